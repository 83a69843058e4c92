#!/usr/bin/env bash
# Makes .cache/interpreter: the data directory of a server that has the template
# code-interpreter-v1, for with-server.sh to start others from. It is made again
# when the interpreter or the programs that its memory needs have changed; the
# packages are fetched again only for another interpreter.
set -euo pipefail
source "$(dirname "$0")/server.sh"
if [ "$(id -u)" -ne 0 ]; then exec sudo --preserve-env=PATH,HTTPS_PROXY,PIP_INDEX_URL -- "$0" "$@"; fi

cache="$root/.cache/interpreter"
mkdir -p "$root/.cache"
exec 9>"$root/.cache/interpreter.lock"
flock 9 # who waited finds it made
stamp=$(cat "$root"/bin/cove-guest "$root"/bin/runsc "$root"/interpreter/*.go "$root"/interpreter/inside/* | sha256sum | cut -c1-32)
[ "$(cat "$cache/stamp" 2>/dev/null)" != "$stamp" ] || exit 0
[ -e "$cache/stamp" ] || rm -rf "$cache"

data=$(mktemp -d /tmp/cove-XXXXXX)
server=
cleanup() {
  local code=$?
  trap - EXIT INT TERM
  set +e
  [ -z "$server" ] || { COVE_DATA=$data "$cove" rm --all >/dev/null 2>&1; end_server "$server" 30; wait "$server" 2>/dev/null; }
  "$cove" reap --data "$data" >/dev/null 2>&1
  [ $code -eq 0 ] || { echo "--- the server's log ends with:"; tail -n 20 "$data/serve.log"; } >&2
  rm -rf "$data"
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

from=$cache
if [ ! -e "$cache/cove.db" ]; then
  from="$root/.cache/base"
  "$cove" image bootstrap --data "$from" >/dev/null
fi
clone_data "$from" "$data"
"$cove" serve --data "$data" --listen 127.0.0.1:0 >"$data/serve.log" 2>&1 </dev/null 9>&- &
server=$!
for ((i = 0; i < 600; i++)); do
  [ ! -s "$data/pid" ] || break
  kill -0 "$server"
  sleep 0.1
done
COVE_DATA=$data "$cove" health --wait 30s >/dev/null
echo 'making the template of the code interpreter: about two minutes the first time'
COVE_DATA=$data COVE_URL=$(cat "$data/url") "$cove" code setup >/dev/null
COVE_DATA=$data "$cove" rm --all >/dev/null 2>&1 || true
end_server "$server" 30
wait "$server" 2>/dev/null || true
server=
rm -rf "$cache.new"
mkdir -p "$cache.new"
clone_data "$data" "$cache.new"
echo "$stamp" >"$cache.new/stamp"
rm -rf "$cache"
mv "$cache.new" "$cache"
