#!/bin/sh
# Makes .venv with everything that Telescope needs: `scripts/setup.sh cpu` or `... gpu`, or what
# needs neither an engine nor the trainer: `... light`. Without one of them, the stack that .venv
# holds, which has to have the trainer, else cpu.
# Needs Python 3.11 to 3.13 and nothing else. A second call without changes does nothing.
#
# uv is installed into .venv and does the rest; scripts/install_stack.sh says what it installs.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/.telescope-setup
done_stack='' done_inputs=''
if [ -f "$stamp" ]; then
    read -r done_stack done_inputs <"$stamp" || true
fi
stack=${1:-${done_stack:-cpu}}

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

case $stack in
cpu) size='4 GB' ;;
gpu) size='9 GB' ;;
light) size='550 MB' ;;
*) fail "expected cpu, gpu or light, got '$stack'" ;;
esac

[ -n "${1:-}" ] || [ "$stack" != light ] ||
    fail "expected the cpu or gpu stack, and .venv holds the light one, which has no trainer;" \
        "run 'make clean', then 'make setup' (4 GB)"

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" ||
            fail "expected Python 3.11, 3.12 or 3.13, and PYTHON=$PYTHON is $(version_of "$PYTHON");" \
                "set PYTHON to the path of one of these, or unset it"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "expected Python 3.11, 3.12 or 3.13, and found none (python3 is $(version_of python3));" \
        "install one, or set PYTHON to its path"
}

# A Python that is asked for and not used would be found out much later.
check_venv() {
    held=$(version_of .venv/bin/python)
    is_supported .venv/bin/python ||
        fail "expected Python 3.11, 3.12 or 3.13, and .venv has $held; run 'make clean' first"
    if [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON")" != "$held" ]; then
        fail ".venv has Python $held, and PYTHON=$PYTHON is $(version_of "$PYTHON"); run 'make clean'" \
            "first, or unset PYTHON"
    fi
}

[ ! -x .venv/bin/python ] || check_venv
inputs=$(cat scripts/setup.sh scripts/install_stack.sh scripts/package_index.sh constraints/*.txt \
    pyproject.toml packages/*/pyproject.toml | cksum)
wanted="$stack $inputs"
[ "$done_stack $done_inputs" != "$wanted" ] || exit 0
[ "${done_stack:-$stack}" = "$stack" ] ||
    fail ".venv holds the $done_stack stack; run 'make clean' first"

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv ||
        fail "'$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
fi
# A set-up that was broken off is gone on with, and not taken for one of the other stack.
echo "$stack unfinished" >"$stamp"

uv_version=$(sed -n 's/^uv==//p' constraints/cpu.txt)
if ! .venv/bin/uv --version 2>/dev/null | grep -q "^uv $uv_version "; then
    say "installing uv $uv_version"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet "uv==$uv_version"
fi

say "installing the $stack stack (about $size on disk)"
scripts/install_stack.sh "$stack" install --python .venv/bin/python --quiet

# Importing once writes the byte code that later starts read: vLLM then loads in 11 s instead of
# 27 s. It matters most where PYTHONDONTWRITEBYTECODE is set, because there nothing else writes it.
warm() { env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import $1" >/dev/null 2>&1 || true; }
pages='typer, rich, pyarrow.parquet, telescope_cli.main, telescope_cli.eval.command, duckdb, telescope_ui.web.app'
finish() {
    wait
    echo "$wanted" >"$stamp"
    say "done; the command is .venv/bin/telescope"
    exit 0
}

if [ "$stack" = light ]; then
    warm "$pages"
    finish
fi

. scripts/package_index.sh
# What only some tests use stays beside site-packages: `beside FOLDER PACKAGE...`.
beside() {
    folder=$1
    shift
    for package; do
        set -- "$@" "$package==$(sed -n "s/^$package==//p" constraints/dev.txt)"
        shift
    done
    .venv/bin/uv pip install --python .venv/bin/python --quiet --no-deps --target ".venv/$folder" "$@"
}
# transformers imports torchao at every start where it finds it, which takes half a second and prints
# what it could not load.
beside low-bit-optimizers torchao
# trackio asks for a Pillow below the one that vLLM has. It works with that one.
beside trackio trackio gradio-client brotli

# The megatron-core of newer Pythons cannot be installed beside that of Python 3.11. Tests hold what
# Telescope calls against its sources.
newer=$(sed -n "s/^megatron-core==\([^ ]*\) ; python_version >= .*/\1/p" constraints/gpu.txt)
.venv/bin/uv pip install --python .venv/bin/python --python-version 3.12 --quiet --no-deps \
    --target .venv/newer-megatron "megatron-core==$newer"

say "byte-compiling what is imported at every start"
warm "vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, \
vllm.model_executor.models.qwen3" &
warm "ray, datasets, pandas, math_verify, torch.distributed.fsdp, torch.distributed.checkpoint, \
transformers.models.qwen3.modeling_qwen3, pytest, hypothesis, telescope_train.run, \
telescope_train.plan.text, $pages"
finish
