#!/usr/bin/env bash
# E2B's SDKs in domain mode, against the server that with-server.sh has started, where
# wildcard_dns.py says what names are.
set -euo pipefail
cd "$(dirname "$0")/../.."
eval "$(bin/cove e2b env --domain)"
.venv/bin/python -m pytest -q -p no:cacheprovider e2e/e2b-domain
if [ -d e2e/e2b/node_modules ]; then node --test --test-timeout=120000 e2e/e2b/domain.mjs; fi
