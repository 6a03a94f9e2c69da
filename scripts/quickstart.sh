#!/bin/sh
# The whole path on this machine: install two environments, warm a small model up on their gold
# answers, train it with reinforcement learning, evaluate what was exported.
set -eu
name=quickstart
. "$(dirname "$0")/walkthrough.sh"

keep runs/quickstart-base
keep runs/quickstart-start
keep runs/quickstart
step telescope env install math-reasoning countdown
step telescope sft examples/sft.toml
step telescope train examples/quickstart.toml
step telescope eval math-reasoning --model runs/quickstart/checkpoints/final/hf \
    --env.level digit --env.operations + --env.instruction= --max-tokens 12 \
    --examples 200 --rollouts 4 --k 1,4
finished "open runs/quickstart/report.html"
