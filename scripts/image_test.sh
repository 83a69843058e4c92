#!/usr/bin/env bash
# Builds the container image with buildah and runs it as a privileged container
# would be: its own root by pivot_root (in a chroot no user namespace can be made,
# and sentries have one), the host's /proc, /sys and /dev, and the image's command.
#   image_test.sh TAG      ("make image-test"; root; apt-get install buildah)
# Where Docker Hub cannot be reached, debian:trixie-slim is made by mmdebstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-cove:test}
dir=$(mktemp -d /tmp/cove-image-XXXXXX)
export CONTAINERS_STORAGE_CONF="$dir/storage.conf" STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/root"\nrunroot = "%s/run"\n' "$dir" "$dir" >"$CONTAINERS_STORAGE_CONF"
server=
cleanup() {
  [ -z "$server" ] || kill -TERM "$server" 2>/dev/null || true
  [ -z "$server" ] || inside cove reap --data /var/lib/cove || true
  buildah rm --all >/dev/null 2>&1 || true
  rm -rf "$dir"
}
trap cleanup EXIT

base=docker.io/library/debian:trixie-slim
if ! timeout 60 buildah pull -q "$base" >/dev/null 2>&1; then
  echo "no registry: making $base by mmdebstrap"
  mmdebstrap --quiet --variant=minbase trixie "$dir/base.tar" http://deb.debian.org/debian
  from=$(buildah from scratch)
  buildah add -q "$from" "$dir/base.tar" / >/dev/null
  buildah commit -q --rm "$from" "$base" >/dev/null
fi
make --no-print-directory -s image IMAGE="$tag"
container=$(buildah from --pull-never "localhost/$tag")
root=$(buildah mount "$container")

# inside COMMAND... runs with the image's root, as its own.
inside() {
  # shellcheck disable=SC2016
  unshare --mount bash -c 'set -eu
    root=$1; shift
    mount --make-rprivate /
    mount --rbind "$root" "$root"
    for d in proc sys dev; do mount --rbind /$d "$root/$d"; done
    cd "$root"; mkdir -p .old; pivot_root . .old; cd /; umount -l /.old; rmdir /.old
    exec "$@"' inside "$root" "$@"
}
inside cove version
inside cove doctor --preflight --data /var/lib/cove

# The tests' base image, so that the server need not make it.
mkdir -p "$root/var/lib/cove/images/blobs"
cp -a .cache/base/images/blobs/. "$root/var/lib/cove/images/blobs/"
cp .cache/base/cove.db* "$root/var/lib/cove/"
mapfile -t command < <(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' "$container" | grep .)
echo "the image runs: ${command[*]}"
inside "${command[@]}" --listen 127.0.0.1:0 >"$dir/log" 2>&1 </dev/null &
for ((i = 0; i < 300; i++)); do
  [ -s "$root/var/lib/cove/pid" ] && break
  sleep 0.1
done
server=$(cat "$root/var/lib/cove/pid") || { cat "$dir/log" >&2; exit 1; }
there=(nsenter -t "$server" -m)
"${there[@]}" cove health --wait 30s
[ "$("${there[@]}" cove run -- python3 -c 'print(6*7)')" = 42 ]
id=$("${there[@]}" cove create)
"${there[@]}" cove fork "$id" -n 2 >/dev/null
"${there[@]}" cove rm --all >/dev/null
echo "image $tag: ok"
