#!/usr/bin/env bash
# The race detector over every package whose tests need no gVisor: of it the
# detector would compile 267 packages, which takes longer than all the tests. Tests
# that need it in a package that else does not are behind "//go:build !race".
#   race.sh [packages]
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=1 # the detector is C
if [ $# -gt 0 ]; then
  packages=("$@")
else
  # Left out: what reaches the driver in its code or its tests, and what starts
  # real servers.
  mapfile -t packages < <(go list -race -test -f '{{.ImportPath}} {{.Deps}}' ./... |
    awk '$1 ~ /\.test$/ && !/cove\/runtime\/gvisor/ { sub(/\.test$/, "", $1); print $1 }' | grep -Ev '/cove/(cmd|e2e|bench)')
fi
[ ${#packages[@]} -gt 0 ]
echo "race detector over ${#packages[@]} packages"
# Short: what repeats thousands of times does so less often; every path stays.
go test -race -short -timeout 10m "${packages[@]}"
