#!/usr/bin/env bash
# Ends the server. By design sandboxes outlive it, so they are removed first,
# and whatever is left of them after: the machine is as before. KEEP=1 ends
# the server alone; the next start finds its sandboxes again.
set -euo pipefail
source "$(dirname "$0")/server.sh"
: "${DATA:=/var/lib/cove}" "${KEEP:=}"
export COVE_DATA=$DATA
unset COVE_URL COVE_KEY

if pid=$(cove_pid "$DATA"); then
  if [ -z "$KEEP" ]; then
    n=$(as_root env COVE_DATA="$DATA" "$cove" rm --all | wc -l) || echo "cove: not all sandboxes could be removed through the API" >&2
    [ "${n:-0}" -eq 0 ] || echo "removed $n sandboxes"
  fi
  end_server "$pid" 30
  echo "stopped (pid $pid)"
else
  echo "Cove is not running"
fi
if [ -z "$KEEP" ] && [ -d "$DATA/node" ] && [ -x "$cove" ]; then
  as_root "$cove" reap --data "$DATA"
fi
