#!/usr/bin/env bash
# Runs the tests in steps, all of them even when one fails, and says at the end
# which did.
#   test.sh [go] [python] [docs]  default: all;  PKG=./cli/... narrows go
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
what=${*:-go python docs}
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
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo env "PATH=$PATH" "HOME=$HOME" "CGO_ENABLED=0" "GOFLAGS=${GOFLAGS:-}"); fi

if [[ $what == *go* ]]; then
  # Two packages at a time: timings and kernels share the machine.
  # shellcheck disable=SC2086
  step "Go: unit and integration on real gVisor" "${as_root[@]}" go test -p 2 -timeout 30m $PKG
fi
if [[ $what == *docs* ]]; then
  step "Examples of README and docs" scripts/with-server.sh .venv/bin/python scripts/docs.py --expect 18 README.md docs/*.md
fi
if [[ $what == *python* ]]; then
  step "Python SDK: unit" .venv/bin/python -m pytest -q -p no:cacheprovider sdk/python
  step "Python SDK: live server on real gVisor" scripts/with-server.sh .venv/bin/python -m pytest -q -p no:cacheprovider sdk/python -m live
  step "Soak: operations while the server is killed" scripts/with-server.sh .venv/bin/python scripts/soak_ops.py --seconds 40 --clients 4 --kill 12
fi

printf '\n=== summary\n'
for i in "${!names[@]}"; do printf '  %-8s %4d s   %s\n' "${results[$i]}" "${times[$i]}" "${names[$i]}"; done
exit $failed
