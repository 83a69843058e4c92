#!/usr/bin/env bash
# Every check runs, then the verdict.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
failed=0
check() { # NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  if "$@"; then printf 'ok      %-12s %3d s\n' "$name" $((SECONDS - start)); else printf 'FAILED  %s\n' "$name"; failed=1; fi
}
formatted() {
  local bad
  bad=$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l)
  [ -z "$bad" ] || { echo "not gofmt'ed (gofmt -w fixes it):"; echo "$bad"; return 1; }
}
check gofmt formatted
check vet go vet ./...
check "vet api" env GOFLAGS= go -C api vet ./...
check staticcheck env GOFLAGS= "${STATICCHECK:-staticcheck}" ./... # it asks Go about things outside modules too
if [ -x .venv/bin/ruff ]; then check ruff .venv/bin/ruff check --quiet sdk/python; fi
if [ -x .venv/bin/mypy ]; then check mypy bash -c 'cd sdk/python && ../../.venv/bin/mypy --no-error-summary'; fi
exit $failed
