#!/usr/bin/env bash
# Runs the suites over sandboxes that share the memory of a checkpoint, and over
# kernels that served another sandbox before (e2e/world/origin.go), all of them
# even when one fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
failed=()
run() { # WHAT COMMAND...
  local what=$1
  shift
  printf '=== %s\n' "$what"
  "$@" || failed+=("$what")
}
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo env "PATH=$PATH" "HOME=$HOME" "CGO_ENABLED=0" "GOFLAGS=${GOFLAGS:-}"); fi
for origin in child reused; do
  run "hostile and crash suites, $origin" "${as_root[@]}" env COVE_ORIGIN=$origin COVE_SOAK=1 go test -p 1 -count 1 -timeout 40m ./e2e -run 'TestHostile$|TestCrashLoop$|TestStateCrashLoop$'
  run "metamorphic suite, $origin" "${as_root[@]}" env COVE_ORIGIN=$origin COVE_SOAK=1 go test -p 1 -count 1 -timeout 30m ./node/agent -run 'TestMetamorphic$'
  run "operations while the server is killed, $origin" scripts/with-server.sh .venv/bin/python scripts/soak_ops.py --seconds 120 --clients 4 --kill 20 --origin $origin
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
