"""What benchmarks of whole runs on CPU share: a model, an environment, and the command line."""

import os
import subprocess
import sys
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.models.tiny import character_tokenizer

TELESCOPE = (sys.executable, "-c", "from telescope_cli.main import main; main()")
ENVIRONMENT = '''
from telescope_core import Example, SingleTurnEnvironment, reward

class Share(SingleTurnEnvironment):
    """Rewards the share of vowels: no two answers earn the same, so that all are trained on."""

    def draw(self, random):
        return Example(id=str(random.random()), prompt=f"{random.randrange(10**8):08d}")

    @reward
    def vowels(self, rollout):
        text = rollout.completion_text or "."
        return sum(one in "aeiou" for one in text) / len(text)
'''


def make_model(folder: Path, *, layers: int = 4, heads: int = 3, positions: int = 2048) -> Path:
    """Write a random model, by default of about 2M parameters, which ends an answer by chance."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64 * heads,
        intermediate_size=192 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(verb: str, folder: Path, flags: list[str]) -> str:
    """Run a command of Telescope; returns what it printed."""
    done = subprocess.run(
        [*TELESCOPE, verb, "run.toml", *flags],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{verb} {' '.join(flags)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout
