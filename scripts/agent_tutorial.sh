#!/bin/sh
# A small model learns to use a shell in a sandbox, on this machine's CPU: `make agent-tutorial`.
# docs/tutorials/agent.md tells the same step by step.
set -eu
cd "$(dirname "$0")/.."
began=$(date +%s)
scripts/setup.sh cpu
scripts/sandboxes.sh
PATH="$PWD/.venv/bin:$PATH"
export PATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# An earlier run is kept: runs/agent becomes runs/agent.1, .2 and so on.
keep() {
    [ -e "$1" ] || return 0
    number=1
    while [ -e "$1.$number" ]; do number=$((number + 1)); done
    mv "$1" "$1.$number"
    echo "agent-tutorial: moved the earlier $1 to $1.$number"
}

step() {
    echo
    echo "$ $*"
    "$@"
}

keep runs/agent-base
keep runs/agent-start
keep runs/agent
step python examples/agent.py runs/agent-demonstrations.jsonl
step telescope sft examples/agent-sft.toml
step telescope train examples/agent.toml
step telescope doctor runs/agent
echo
echo "agent-tutorial: finished in $(($(date +%s) - began)) s; see it with: telescope ui runs"
