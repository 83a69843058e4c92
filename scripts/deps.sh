#!/usr/bin/env bash
# Installs the system packages that are missing, and only those.
#   deps.sh [server] [test] [bench] [image]
set -euo pipefail

# What must be there -> the Debian and Ubuntu package that brings it.
server=(
  "command -v mkfs.erofs|erofs-utils"
  "command -v mmdebstrap|mmdebstrap"
  "command -v mkfs.ext4|e2fsprogs"
  "command -v tar|tar"
  "test -e /etc/ssl/certs/ca-certificates.crt|ca-certificates"
  "python3 -c 'import venv, ensurepip'|python3-venv"
)
test=(
  "command -v git|git"
  "command -v curl|curl"
  "command -v tmux|tmux"
  "command -v gcc|gcc" # with the next, for the race detector
  "test -e /usr/include/stdlib.h|libc6-dev"
  "command -v ssh && command -v sftp && command -v scp|openssh-client"
  "command -v skopeo|skopeo" # pulls what was pushed
)
image=(
  "command -v buildah|buildah"
  "command -v crun || command -v runc|crun"
)
bench=(
  "command -v runc|runc"
)

PATH="$PATH:/usr/sbin:/sbin"
missing=()
for group in "$@"; do
  declare -n list="$group"
  for entry in "${list[@]}"; do
    if ! bash -c "${entry%|*}" >/dev/null 2>&1; then
      missing+=("${entry##*|}")
    fi
  done
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(uname -s)" != Linux ]; then
  echo "cove: sandboxes need Linux; this is $(uname -s)" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "cove: please install the equivalent of these Debian packages: ${missing[*]}" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "cove: run as root: apt-get install -y ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi

echo "installing ${missing[*]} (apt-get)"
install() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -qq "${missing[@]}" </dev/null; }
# A fresh machine or image has no package lists, or old ones: try, then refresh.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install >"$log" 2>&1; then
  echo "refreshing the package lists"
  if ! { "${sudo[@]}" apt-get update -qq && install; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "cove: apt-get could not install: ${missing[*]}" >&2
    exit 1
  fi
fi
