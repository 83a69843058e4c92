#!/usr/bin/env bash
# The suites themselves; scripts/e2b_suite.sh has made what they need.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
at=$root/.cache/e2b-suite
what=$1
shift
eval "$("$root/bin/cove" e2b env --domain)"
# Docker Hub is not asked: where templates begin with ubuntu:22.04 it is Cove's own image.
echo FROM base | "$root/bin/cove" image build -t ubuntu:22.04 - >/dev/null || exit 1
failed=0
wanted() { [ "$what" = all ] || [ "$what" = "$1" ]; }

# run_pytest SUITE DIR ARG...: less what "skips" has of that suite.
run_pytest() {
  local suite=$1 dir=$2 skips
  shift 2
  mapfile -t skips < <(sed -n "s/^$suite \\(.*\\) # .*/--deselect=\\1/p" "$here/skips")
  (cd "$dir" && "$at/venv/bin/python" -m pytest -q -p no:cacheprovider --timeout 120 -n "${E2B_SUITE_WORKERS:-4}" "${skips[@]}" "$@") || failed=1
}

# run_vitest SUITE DIR ARG...: likewise, by files, and by names, which it takes as one expression.
run_vitest() {
  local suite=$1 dir=$2 names files
  shift 2
  mapfile -t files < <(sed -n "s/^$suite \\(tests.*\\) # .*/--exclude=\\1/p" "$here/skips")
  names=$(sed -n "s/^$suite \\([^#]*\\) # .*/\\1/p" "$here/skips" | grep -v ^tests/ | sed 's#[]*.+?^${}()|/[]#\\&#g' | paste -sd '|')
  (cd "$dir" && "$at/node_modules/.bin/vitest" run --maxWorkers "${E2B_SUITE_WORKERS:-4}" --testNamePattern "^(?!.*(?:$names)\$)" "${files[@]}" "$@") || failed=1
}

if wanted python; then run_pytest python "$at/python" "$@"; fi
if wanted js; then run_vitest js "$at/js" --project unit --project template --project connectionConfig "$@"; fi
if wanted code-python; then run_pytest code-python "$at/code/python" "$@"; fi
if wanted code-js; then run_vitest code-js "$at/code/js" "$@"; fi
if wanted older; then "$at/older/bin/python" "$here/older.py" || failed=1; fi
exit $failed
