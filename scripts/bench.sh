#!/usr/bin/env bash
# Measures against a server of its own. Arguments go to the benchmark.
set -euo pipefail
cd "$(dirname "$0")/.."
exec scripts/with-server.sh .venv/bin/python bench/bench.py "$@"
