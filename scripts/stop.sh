#!/usr/bin/env bash
# Ends the server. Sandboxes outlive it: the next start finds them again. ALL=1
# removes them first, and whatever is left of them after: the machine is as
# before. (KEEP=1, from when removing was the default, wins over ALL=1.)
set -euo pipefail
source "$(dirname "$0")/server.sh"
: "${DATA:=/var/lib/cove}" "${ALL:=}" "${KEEP:=}"
[ -z "$KEEP" ] || ALL=
export COVE_DATA=$DATA
unset COVE_URL COVE_KEY

if pid=$(cove_pid "$DATA"); then
  if [ -n "$ALL" ]; then
    n=$(as_root env COVE_DATA="$DATA" "$cove" rm --all | wc -l) || echo "cove: not all sandboxes could be removed through the API" >&2
    [ "${n:-0}" -eq 0 ] || echo "removed $n sandboxes"
  else
    n=$(as_root env COVE_DATA="$DATA" "$cove" ls -q | wc -l) || n=0
  fi
  end_server "$pid" 30
  echo "stopped (pid $pid)"
  if [ -z "$ALL" ] && [ "$n" -gt 0 ]; then
    echo "$n sandboxes run on, and the next 'make start' finds them ('make down' removes them)"
  fi
else
  echo "Cove is not running"
fi
if [ -n "$ALL" ] && [ -d "$DATA/node" ] && [ -x "$cove" ]; then
  as_root "$cove" reap --data "$DATA"
fi
