# Shared by start.sh, stop.sh and with-server.sh; sourced.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cove="$root/bin/cove"

# Sandboxes need root. sudo keeps a terminal's Ctrl-C and asks at most once.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -- "$@"; fi
}

# cove_pid DATA prints the pid of the server of a data directory if it runs. A
# stale pid file may name a process that is something else by now.
cove_pid() {
  local pid args
  pid=$(cat "$1/pid" 2>/dev/null) || return 1
  [[ $pid =~ ^[0-9]+$ ]] || return 1
  # The redirection fails where the process is gone, before 2> of the same command would count.
  args=$({ tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null) || return 1
  [[ $args == *cove\ serve\ * ]] || return 1
  echo "$pid"
}

# end_server PID SECONDS sends SIGTERM and waits.
end_server() {
  local pid=$1 i
  as_root kill -TERM "$pid" 2>/dev/null || return 0
  for ((i = 0; i < $2 * 10; i++)); do
    as_root kill -0 "$pid" 2>/dev/null || return 0
    [[ $(awk '{print $3}' "/proc/$pid/stat" 2>/dev/null) == Z ]] && return 0
    sleep 0.1
  done
  echo "cove: process $pid did not stop within $2 s; killing it" >&2
  as_root kill -KILL "$pid" 2>/dev/null || true
  sleep 0.2
}

# clone_data FROM TO gives TO the images, snapshots, names and keys of a data
# directory whose server does not run. Content never changes, so it is linked, not
# copied; databases are each server's own.
clone_data() {
  local part
  for part in images/blobs state; do
    [ -d "$1/$part" ] || continue
    mkdir -p "$2/$part"
    cp -al "$1/$part/." "$2/$part/" 2>/dev/null || cp -a "$1/$part/." "$2/$part/"
  done
  for part in "$1"/cove.db* "$1"/key "$1"/*.key; do
    [ ! -e "$part" ] || cp "$part" "$2/"
  done
}
