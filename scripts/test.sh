#!/usr/bin/env bash
# Runs the tests in steps, all of them even when one fails, and says at the end
# which did.
#   test.sh [go] [python] [docs] [e2b] [adapters]  default: all;  PKG=./cli/... narrows go
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
what=${*:-go python docs e2b adapters}
: "${PKG:=./...}"
names=() results=() times=()
failed=0

step() { # NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  if "$@"; then results+=(ok); else results+=(FAILED); failed=1; fi
  names+=("$name") times+=($((SECONDS - start)))
}

# Integration tests run sandboxes, which takes root.
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo env "PATH=$PATH" "HOME=$HOME" "CGO_ENABLED=0" "GOFLAGS=${GOFLAGS:-}" "COVE_SOAK=${COVE_SOAK:-}"); fi

# Their output is long: what failed is said once more in the summary.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
go_tests() {
  # shellcheck disable=SC2086
  "${as_root[@]}" go test -p 2 -timeout 30m $PKG 2>&1 | tee "$log"
}

if [[ $what == *go* ]]; then
  # Two packages at a time: timings and kernels share the machine.
  step "Go: unit and integration on real gVisor" go_tests
fi
if [[ $what == *docs* ]]; then
  step "make start, stop and down" "${as_root[@]}" scripts/start_test.sh
  step "Examples of README and docs" env COVE_INTERPRETER=1 scripts/with-server.sh .venv/bin/python scripts/docs.py --expect 37 README.md docs/*.md sdk/python/README.md
  step "Examples" scripts/with-server.sh .venv/bin/python examples/rlm.py
fi
if [[ $what == *python* ]]; then
  step "Python SDK: unit" .venv/bin/python -m pytest -q -p no:cacheprovider sdk/python
  step "Python SDK: live server on real gVisor" env COVE_INTERPRETER=1 scripts/with-server.sh .venv/bin/python -m pytest -q -p no:cacheprovider sdk/python -m live
  step "Soak: operations while the server is killed" scripts/with-server.sh .venv/bin/python scripts/soak_ops.py --seconds 40 --clients 4 --kill 12
fi
if [[ $what == *e2b* ]]; then
  step "E2B's Python SDK: live server on real gVisor" env COVE_INTERPRETER=1 .venv/bin/python e2e/e2b/outside.py scripts/with-server.sh .venv/bin/python -m pytest -q -p no:cacheprovider e2e/e2b
  if [ -d e2e/e2b/node_modules ]; then
    step "E2B's JavaScript SDK: live server on real gVisor" env COVE_INTERPRETER=1 .venv/bin/python e2e/e2b/outside.py scripts/with-server.sh node --test --test-timeout=120000 e2e/e2b/sdk.mjs e2e/e2b/code.mjs
  else
    echo "E2B's JavaScript SDK is not tested: there is no node 20 here"
  fi
  step "E2B's SDKs in domain mode" env COVE_INTERPRETER=1 COVE_SERVE_ARGS="--gateway-domain cove.test --tls-self" \
    scripts/with-server.sh python3 scripts/wildcard_dns.py cove.test 127.0.0.1 127.0.0.78 e2e/e2b-domain/run.sh
fi
if [[ $what == *adapters* ]]; then
  step "Adapters for RL and agent frameworks" scripts/with-server.sh .venv-adapters/bin/python -m pytest -q e2e/adapters
fi

printf '\n=== summary\n'
for i in "${!names[@]}"; do printf '  %-8s %4d s   %s\n' "${results[$i]}" "${times[$i]}" "${names[$i]}"; done
if [ $failed -ne 0 ]; then
  grep -E -A 3 '^ *--- FAIL|^panic:|^FAIL' "$log" | grep -v 'level=' | cut -c -400 | tail -n 60
fi
exit $failed
