#!/usr/bin/env bash
# Starts the server in the background, once, and shows a first sandbox.
#   DATA=/var/lib/cove [LISTEN=ADDRESS] [SERVE_ARGS='--ssh 127.0.0.1:7722 …'] start.sh
set -euo pipefail
source "$(dirname "$0")/server.sh"
: "${DATA:=/var/lib/cove}" "${LISTEN:=}" "${SERVE_ARGS:=}"
read -ra given <<<"${LISTEN:+--listen $LISTEN }$SERVE_ARGS"
log="$DATA/serve.log"
export COVE_DATA=$DATA
unset COVE_URL COVE_KEY

next() {
  local run="bin/cove"
  [ "$(id -u)" -eq 0 ] || run="sudo bin/cove"
  local data=""
  [ "$DATA" = /var/lib/cove ] || data=" --data $DATA"
  cat <<TXT

  URL   $(cat "$DATA/url")
  key   $DATA/key   (eval "\$($run env$data)" exports both)
  log   $log

Try next:
  eval "\$($run env$data)"
  bin/cove run -it -- bash
  .venv/bin/python -c 'from cove import Sandbox
with Sandbox.create() as sb: print(sb.exec("uname -a").stdout)'
  bin/cove --help          ('make stop' ends the server, 'make down' its sandboxes too)
TXT
}

if pid=$(cove_pid "$DATA"); then
  echo "Cove is already running: pid $pid, $(cat "$DATA/url")"
  [ ${#given[@]} -eq 0 ] || echo "cove: it goes on as it is, without ${given[*]}: 'make restart' with the same takes it" >&2
  next
  exit 0
fi

# Say exactly what is missing before anything is started.
if ! checks=$(as_root "$cove" doctor --preflight --data "$DATA"); then
  echo "$checks"
  echo "cove: this machine cannot run a server yet; see above" >&2
  exit 1
fi

# Kernels run as nobody and pass through; nobody looks into it. Its log may hold
# what callers named.
as_root install -d -m 0711 "$DATA"
as_root bash -c 'umask 077; touch "$0"; chmod 0600 "$0"' "$log"
echo "making sure the base image is there (Debian by mmdebstrap: one to two minutes the first time)"
as_root "$cove" image bootstrap --data "$DATA" >/dev/null

# What it was given once holds for the next start too: cove serve reads this file.
# One that no server starts with does not stay.
options="$DATA/cove.toml"
as_before() { :; }
if [ ${#given[@]} -gt 0 ]; then
  as_root rm -f "$options.before"
  ! as_root test -e "$options" || as_root cp -p "$options" "$options.before"
  as_root "$cove" serve --data "$DATA" --save-config "${given[@]}"
  as_before() {
    as_root rm -f "$options"
    ! as_root test -e "$options.before" || as_root mv "$options.before" "$options"
    echo "cove: ${given[*]} is not kept" >&2
  }
fi
echo "starting cove serve"
# The log is appended to: what an earlier server said about its end stays.
# setsid: Ctrl-C in this terminal is not for the server.
started=$(as_root bash -c 'setsid nohup "$0" serve --data "$1" </dev/null >>"$2" 2>&1 & echo $!' "$cove" "$DATA" "$log")

for ((i = 0; i < 600; i++)); do
  if pid=$(cove_pid "$DATA"); then break; fi
  if ! [ -e "/proc/$started" ]; then
    echo "cove: the server did not start; its log ends with:" >&2
    as_root tail -n 15 "$log" >&2
    as_before
    exit 1
  fi
  if ((i % 50 == 49)); then echo "  … waiting for the server ($((i / 10 + 1)) s; log: $log)"; fi
  sleep 0.1
done
if ! COVE_URL=$(cat "$DATA/url") "$cove" health --wait 30s >/dev/null; then
  as_root tail -n 15 "$log" >&2
  exit 1
fi
as_root rm -f "$options.before"
echo "running: pid $pid"
echo
echo "A first sandbox:"
as_root env COVE_DATA="$DATA" "$cove" tour
next
