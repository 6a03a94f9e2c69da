#!/bin/sh
# Runs the quick tests with the oldest versions that the packages say they work with, or with the
# newest: `scripts/test_versions.sh lowest|newest [options of run_tests.py]`, in .venv/lowest or
# .venv/newest. Engines and frameworks are left out: they say which versions they work with.
set -eu
cd "$(dirname "$0")/.."
. scripts/package_index.sh
which=$1
shift
case $which in
lowest) resolution=lowest-direct ;;
newest) resolution=highest ;;
*)
    echo "expected lowest or newest, got '$which'" >&2
    exit 1
    ;;
esac
uv=$PWD/.venv/bin/uv
venv=$PWD/.venv/$which
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT INT TERM

install() { "$uv" pip install --quiet --python "$venv/bin/python" "$@"; }

"$uv" venv --quiet --clear --python .venv/bin/python "$venv"
install --resolution $resolution --overrides constraints/overrides.txt \
    "torch==$(sed -n 's/^torch===\([^ ]*\).*/\1/p' constraints/cpu.txt)" \
    -e 'packages/telescope-core[records,datasets,math,mcp]' -e packages/telescope-adapters \
    -e 'packages/telescope-envs[hub,keyring,serve,sigstore]' -e packages/telescope-ui \
    -e 'packages/telescope-train[megatron,lora,gguf]' -e 'packages/telescope-cli[train,ui]'
"$uv" pip freeze --quiet --exclude-editable --python "$venv/bin/python" | tee "$pins"
# The tests' own tools may be new, but must not bring newer versions of what is tested.
cat constraints/overrides.txt >>"$pins"
install --overrides "$pins" --group dev pip
PATH=$venv/bin:$PATH make --no-print-directory BIN="$venv/bin" environments
PATH=$venv/bin:$PATH "$venv/bin/python" scripts/run_tests.py fast "$@" \
    --ignore tests/train/cluster/test_environment_workers.py \
    --ignore tests/contracts/test_routed_experts.py
