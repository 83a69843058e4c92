#!/usr/bin/env bash
# start.sh and stop.sh as people use them: options that stay, a second start, a
# server that was killed, typos, and all of it removed again. Its data directory and
# port are its own.
set -euo pipefail
source "$(dirname "$0")/server.sh"
DATA=$(mktemp -d /tmp/cove-XXXXXX)
export DATA COVE_DATA=$DATA
unset COVE_URL COVE_KEY LISTEN SERVE_ARGS ALL KEEP
out="$DATA.out"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
trap 'ALL=1 "$root/scripts/stop.sh" >/dev/null 2>&1; rm -rf "$DATA" "$out"' EXIT

fail() {
  echo "start_test.sh: $1; the last output:" >&2
  cat "$out" >&2
  exit 1
}
# run WHAT CODE COMMAND...: its output is in $out, and has no complaint of the shell.
run() {
  local what=$1 want=$2 code=0
  shift 2
  "$@" >"$out" 2>&1 </dev/null || code=$?
  [ "$code" -eq "$want" ] || fail "$what: exit code $code, want $want"
  ! grep -qE '\.sh: line [0-9]+' "$out" || fail "$what: an error of the shell"
}
says() { grep -qF -- "$1" "$out" || fail "it does not say '$1'"; }
start() { "$root/scripts/start.sh"; }
stop() { "$root/scripts/stop.sh"; }

# The base image of the other tests; content never changes.
"$cove" image bootstrap --data "$root/.cache/base" >/dev/null
mkdir -p "$DATA/images/blobs"
cp -al "$root/.cache/base/images/blobs/." "$DATA/images/blobs/" 2>/dev/null || cp -a "$root/.cache/base/images/blobs/." "$DATA/images/blobs/"
cp "$root/.cache/base"/cove.db* "$DATA/"
echo '# mine' >"$DATA/cove.toml"

LISTEN="127.0.0.1:$port" SERVE_ARGS='--queue-wait 3s --dns 127.0.0.53,127.0.0.54' run "the first start" 0 start
says "running: pid"
[ "$(cat "$DATA/url")" = "http://127.0.0.1:$port" ] || fail "the url is $(cat "$DATA/url")"
kept=$(cat "$DATA/cove.toml")
for line in '# mine' "listen = \"127.0.0.1:$port\"" 'queue-wait = "3s"' 'dns = "127.0.0.53,127.0.0.54"'; do
  grep -qxF -- "$line" "$DATA/cove.toml" || fail "cove.toml has no line $line: $kept"
done
run "a second start" 0 start
says "already running"
SERVE_ARGS=--no-base run "a second start with options" 0 start
says "without --no-base"

id=$("$cove" create)
run "stop" 0 stop
says "1 sandboxes run on"
run "a second stop" 0 stop
says "not running"
SERVE_ARGS='--queue-wiat 3s' run "a typo" 2 start
says "--queue-wiat"
LISTEN=nonsense run "no address" 1 start
says "is not kept"
[ "$(cat "$DATA/cove.toml")" = "$kept" ] || fail "cove.toml has changed: $(cat "$DATA/cove.toml")"
run "a start without options" 0 start
[ "$(cat "$DATA/url")" = "http://127.0.0.1:$port" ] || fail "the url is $(cat "$DATA/url")"
[ "$("$cove" ls -q)" = "$id" ] || fail "the sandbox is gone"

kill -9 "$(cat "$DATA/pid")"
run "a start after kill -9" 0 start
says "running: pid"
[ "$("$cove" ls -q)" = "$id" ] || fail "the sandbox is gone"
kill -9 "$(cat "$DATA/pid")"
run "a stop after kill -9" 0 stop
says "not running"

run "a last start" 0 start
ALL=1 run "down" 0 stop
says "removed 1 sandboxes"
! grep -qsF -- "$DATA" /proc/[0-9]*/cmdline || fail "processes are left"
echo "start and stop: ok"
