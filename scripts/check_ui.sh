#!/bin/sh
# Proves, where node is there, that the front end of telescope ui is what its sources say: types,
# tests of its parts, the same bytes when it is built, and no fault that axe-core finds.
# Without node, tests/ui/test_built.py still compares the digest of the sources.
set -eu
cd "$(dirname "$0")/.."
web=packages/telescope-ui/web
if ! command -v npm >/dev/null 2>&1; then
    echo "check_ui: node is not there, so the front end is not built again"
    exit 0
fi
if [ ! -d "$web/node_modules" ] &&
    ! (cd "$web" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error); then
    echo "check_ui: the packages of the front end cannot be had, so it is not built again"
    exit 0
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
(cd "$web" && npm run --silent check && npm test --silent >"$place/tests" 2>&1) || {
    cat "$place/tests" 2>/dev/null
    exit 1
}
(cd "$web" && node build.mjs --out "$place/static")
diff -r "$place/static" packages/telescope-ui/src/telescope_ui/static >/dev/null || {
    echo "check_ui: building gives other files than those in the package; run scripts/build_ui.sh" >&2
    exit 1
}
.venv/bin/python -m tests.ui.accessibility "$web/node_modules/axe-core/axe.min.js"
echo "check_ui: the front end is what its sources say"
