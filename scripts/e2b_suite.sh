#!/usr/bin/env bash
# Runs the public test suites of E2B's SDKs, unmodified, against a server of its own
# in domain mode. docs/e2b.md lists what is left out, and why.
#   e2b_suite.sh [python|js|code-python|code-js|older] [ARG...]     ARGs go to pytest or vitest
# E2B_SUITE is a checkout of github.com/e2b-dev/E2B, E2B_CODE_SUITE one of
# github.com/e2b-dev/code-interpreter; without them they are cloned. Nothing is written
# there: tests, SDKs and what they need are copied to .cache/e2b-suite.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
[ $# -eq 0 ] || shift
at=.cache/e2b-suite

# checkout VARIABLE REPOSITORY COMMIT TESTS: the commit is the one of the skips in e2e/e2b/suite; another may have others.
checkout() {
  if [ -z "${!1:-}" ]; then
    declare -g "$1=$at/source-$2"
    if ! [ -d "${!1}" ]; then
      git clone --quiet --filter=blob:none "https://github.com/e2b-dev/$2" "${!1}"
      git -C "${!1}" checkout --quiet "$3"
    fi
  fi
  [ -d "${!1}/$4" ] || { echo "$1=${!1} is no checkout of e2b-dev/$2" >&2; exit 2; }
}
checkout E2B_SUITE E2B b8029973aa7da5f741f7bb1a9f833b38a0885438 packages/python-sdk/tests
checkout E2B_CODE_SUITE code-interpreter 7df1757bfd5baa037f909ce97c2dbe014da973c0 python/tests

# Copied anew when the source is another one.
stamp=$(find "$E2B_SUITE/packages/python-sdk" "$E2B_SUITE/packages/js-sdk" "$E2B_CODE_SUITE/python" "$E2B_CODE_SUITE/js" -type f -not -path '*/node_modules/*' -print0 | sort -z | xargs -0 cksum | cksum)
if [ "$(cat $at/stamp 2>/dev/null)" != "$stamp" ]; then
  rm -rf $at/python $at/js $at/code $at/venv $at/older $at/node_modules $at/package.json $at/stamp
  mkdir -p $at/code
  cp -r "$E2B_SUITE/packages/python-sdk" $at/python
  cp -r "$E2B_SUITE/packages/js-sdk" $at/js
  cp -r "$E2B_CODE_SUITE/python" "$E2B_CODE_SUITE/js" $at/code
  echo 'installing what the suites need'
  python3 -m venv $at/venv
  $at/venv/bin/pip install --quiet --disable-pip-version-check ./$at/python ./$at/code/python 'pytest>=9.0.3,<10' pytest-xdist pytest-dotenv 'pytest-asyncio>=1.3,<2' pytest-timeout
  python3 -m venv $at/older
  $at/older/bin/pip install --quiet --disable-pip-version-check 'e2b>=1.11,<2'
  # The suite's own list has browsers and clouds in it. What is beside the SDK is found from it.
  (cd $at && echo '{"private":true}' >package.json &&
    npm install --silent --ignore-scripts --no-audit --no-fund vitest@^4.1.10 msw@^2.12.10 dotenv@^16.4.5 @vitest/browser-playwright@^4.1.10 playwright@^1.55.1 error-stack-parser-es@^2)
  for sdk in $at/js $at/code/js; do
    (cd $sdk && npm install --silent --legacy-peer-deps --omit=dev --ignore-scripts --no-audit --no-fund --no-save --no-package-lock)
  done
  echo "$stamp" >$at/stamp
fi

case $what in all | code-*) export COVE_INTERPRETER=1 ;; esac
domain=cove.test
export COVE_SERVE_ARGS="--gateway-domain $domain --tls-self"
exec scripts/with-server.sh python3 scripts/wildcard_dns.py $domain 127.0.0.1 127.0.0.77 e2e/e2b/suite/run.sh "$what" "$@"
