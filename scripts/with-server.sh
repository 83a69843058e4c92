#!/usr/bin/env bash
# Runs a command against a real server of its own: free port, fresh data
# directory, the base image taken from a cache. Always cleans up, and fails if
# anything of the server is left afterwards.
#   with-server.sh COMMAND [ARG...]
# The command finds COVE_URL, COVE_KEY and COVE_DATA. COVE_SERVE_ARGS adds
# flags to "cove serve" (e.g. --runtime fake). COVE_INTERPRETER=1: the server has
# the template of the code interpreter.
set -euo pipefail
source "$(dirname "$0")/server.sh"
: "${COVE_SERVE_ARGS:=}" "${COVE_INTERPRETER:=}"

if [ "$(id -u)" -ne 0 ] && [[ $COVE_SERVE_ARGS != *fake* ]]; then
  exec sudo --preserve-env=COVE_SERVE_ARGS,COVE_INTERPRETER,OUTSIDE_IP,OUTSIDE_PORT,OUTSIDE_SEEN,PATH -- "$0" "$@"
fi

# Short: sockets below it have names of at most 107 bytes.
data=$(mktemp -d /tmp/cove-XXXXXX)
chmod 0711 "$data"
server=
cleanup() {
  local code=$?
  trap - EXIT INT TERM
  set +e # whatever happens, go on to the end
  if [ -n "$server" ]; then
    server=$(cove_pid "$data" || echo "$server") # the command may have started another
    COVE_DATA=$data "$cove" rm --all >/dev/null 2>&1 || true
    end_server "$server" 30
    wait "$server" 2>/dev/null || true
  fi
  # shellcheck disable=SC2086
  "$cove" reap --data "$data" $COVE_SERVE_ARGS >/dev/null 2>&1 || true
  # Kernels name their directory in their arguments. Read without a process
  # of ours that would name it too.
  local f args left=()
  for f in /proc/[0-9]*/cmdline; do
    { mapfile -d '' -t args <"$f"; } 2>/dev/null || continue
    [[ "${args[*]}" != *"$data"* ]] || left+=("${args[*]}")
  done
  if [ ${#left[@]} -gt 0 ]; then
    echo "cove: processes were left behind:" >&2
    printf '  %s\n' "${left[@]}" >&2
    [ $code -ne 0 ] || code=1
  fi
  # Groups, mounts and loop devices carry the directory's name or its hash.
  local parent rest
  parent="cove-$(printf %s "$data/gvisor" | sha256sum | cut -c1-8)"
  rest=$(find /sys/fs/cgroup -maxdepth 2 -name "$parent" 2>/dev/null; grep -F "$data" /proc/self/mountinfo; grep -lsF "$data/" /sys/block/loop*/loop/backing_file)
  if [ -n "$rest" ]; then
    printf 'cove: left on the host:\n%s\n' "$rest" >&2
    [ $code -ne 0 ] || code=1
  fi
  if [ $code -ne 0 ]; then
    echo "--- the server's log ends with:" >&2
    tail -n 40 "$data/serve.log" >&2 || true
    [ -z "${COVE_KEEP_LOG:-}" ] || cp "$data/serve.log" "$COVE_KEEP_LOG"
  fi
  # The directory is what a later reap finds kernels by.
  if [ ${#left[@]} -gt 0 ]; then
    echo "cove: kept $data; end them with: $cove reap --data $data" >&2
  else
    rm -rf "$data"
  fi
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# One base image, and one template of the interpreter, serve every test server.
cache="$root/.cache/base"
if [[ $COVE_SERVE_ARGS != *fake* ]]; then
  "$cove" image bootstrap --data "$cache" >/dev/null
  if [ -n "$COVE_INTERPRETER" ]; then
    "$root/scripts/interpreter.sh" >&2
    cache="$root/.cache/interpreter"
  fi
  clone_data "$cache" "$data"
fi

# shellcheck disable=SC2086
"$cove" serve --data "$data" --listen 127.0.0.1:0 $COVE_SERVE_ARGS >"$data/serve.log" 2>&1 </dev/null &
server=$!
for ((i = 0; i < 600; i++)); do
  [ -s "$data/pid" ] && break
  kill -0 "$server" 2>/dev/null || break
  sleep 0.1
done
if ! [ -s "$data/pid" ]; then
  echo "cove: the test server did not start" >&2
  exit 1
fi
COVE_URL=$(cat "$data/url")
COVE_KEY=$(cat "$data/key")
export COVE_URL COVE_KEY COVE_DATA=$data COVE_SERVER_PID=$server
"$cove" health --wait 30s >/dev/null
"$@"
