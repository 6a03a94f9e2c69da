#!/bin/sh
# The whole path on this machine: install two environments, warm a small model up on their gold
# answers, train it with reinforcement learning, evaluate what was exported.
set -eu
cd "$(dirname "$0")/.."
began=$(date +%s)
scripts/setup.sh cpu
PATH="$PWD/.venv/bin:$PATH"
export PATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# An earlier run is kept: runs/quickstart becomes runs/quickstart.1, .2 and so on.
keep() {
    [ -e "$1" ] || return 0
    number=1
    while [ -e "$1.$number" ]; do number=$((number + 1)); done
    mv "$1" "$1.$number"
    echo "quickstart: moved the earlier $1 to $1.$number"
}

step() {
    echo
    echo "$ $*"
    "$@"
}

keep runs/quickstart-base
keep runs/quickstart-start
keep runs/quickstart
step telescope env install math-reasoning countdown
step telescope sft examples/sft.toml
step telescope train examples/quickstart.toml
step telescope eval math-reasoning --model runs/quickstart/checkpoints/final/hf \
    --env.level digit --env.operations + --env.instruction= --max-tokens 12 \
    --examples 200 --rollouts 4 --k 1,4
echo
echo "quickstart: finished in $(($(date +%s) - began)) s; open runs/quickstart/report.html"
