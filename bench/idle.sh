#!/usr/bin/env bash
# N idle sandboxes at once on S servers of this build, each with an image called
# base: one server has room for some 1,500 where it may not have more than
# 20,000 open files. Prints a summary as JSON; bench/density.py says what is measured.
#   N=10000 S=8 BASE=base.tar bench/idle.sh        BASE: a root file system as a tar
set -euo pipefail
cd "$(dirname "$0")/.."
: "${N:=1000}" "${S:=1}" "${BASE:?a root file system as a tar}"
work=$(mktemp -d /tmp/cove-idle-XXXX)
datas=() clients=()
end() {
  trap - EXIT INT TERM
  local data pid
  for data in "${datas[@]}"; do
    pid=$(cat "$data/pid" 2>/dev/null) || continue
    COVE_DATA=$data COVE_URL=$(cat "$data/url") COVE_KEY=$(cat "$data/key") timeout 120 bin/cove rm --all >/dev/null 2>&1 || true
    kill -TERM "$pid" 2>/dev/null || true
    timeout 30 tail --pid="$pid" -f /dev/null || true
    timeout 60 bin/cove reap --data "$data" >/dev/null 2>&1 || true
  done
  rm -rf "$work"
}
trap end EXIT INT TERM
chmod 0711 "$work" # kernels run as nobody
mkdir "$work/meet"
each=$(((N + S - 1) / S))
for ((i = 0; i < S; i++)); do
  data=$work/$i
  mkdir -m 0711 "$data"
  datas+=("$data")
  bin/cove serve --data "$data" --listen 127.0.0.1:0 --no-base >"$data.log" 2>&1 </dev/null &
  for ((n = 0; n < 300; n++)); do
    if [ -s "$data/pid" ]; then break; fi
    sleep 0.1
  done
  COVE_DATA=$data COVE_URL=$(cat "$data/url") COVE_KEY=$(cat "$data/key") bin/cove image import base "$BASE" >/dev/null
done
for ((i = 0; i < S; i++)); do
  COVE_URL=$(cat "$work/$i/url") COVE_KEY=$(cat "$work/$i/key") COVE_DATA=$work/$i COVE_SERVER_PID=$(cat "$work/$i/pid") \
    .venv/bin/python bench/density.py --live "$each" --at-once 8 --meet "$work/meet" --of "$S" >"$work/out$i" &
  clients+=($!)
done
failed=0
for c in "${clients[@]}"; do wait "$c" || failed=1; done
python3 - "$work"/out* <<'PY'
import json, sys
live = [json.load(open(f))["live"] for f in sys.argv[1:]]
print(json.dumps({
    "sandboxes": sum(x["sandboxes"] for x in live),
    "answered": sum(x["answered"] for x in live),
    "create_s": max(x["create_s"] for x in live),
    **{k: [x[k] for x in live] for k in ("kernel_MiB_p50", "server_MiB_each", "machine_MiB_each")},
}, indent=1))
PY
exit $failed
