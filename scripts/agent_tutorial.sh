#!/bin/sh
# A small model learns to use a shell in a sandbox, on this machine's CPU: `make agent-tutorial`.
# docs/tutorials/agent.md tells the same step by step.
set -eu
name=agent-tutorial
. "$(dirname "$0")/walkthrough.sh"
scripts/sandboxes.sh

keep runs/agent-base
keep runs/agent-start
keep runs/agent
step python examples/agent.py runs/agent-demonstrations.jsonl
step telescope sft examples/agent-sft.toml
step telescope train examples/agent.toml
step telescope doctor runs/agent
finished "see it with: telescope ui runs"
