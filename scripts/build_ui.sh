#!/bin/sh
# Builds the front end of telescope ui into its package. Needs node 20 or newer; only who changes
# packages/telescope-ui/web needs to run this, as what is built is kept beside its sources.
set -eu
cd "$(dirname "$0")/../packages/telescope-ui/web"
command -v npm >/dev/null 2>&1 || {
    echo "build_ui: expected node 20 or newer with npm, found none; install it and try again" >&2
    exit 1
}
[ -d node_modules ] || npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
npm run --silent check
npm run --silent build
npm test --silent
