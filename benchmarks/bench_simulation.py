"""Simulated against real steps on CPU: speeds from one run, step times of others predicted.

A small model is trained for real with several schedules. The first run is measured; what
`telescope simulate --speeds-of` then says about each schedule is compared with its real steps.
Run: python benchmarks/bench_simulation.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import facts_of_run, table, write_results
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_core.records import RunFolder
from telescope_train.cluster.ports import free_port
from telescope_train.models.tiny import character_tokenizer

TELESCOPE = (sys.executable, "-c", "from telescope_cli.main import main; main()")
WARM_UP = 5
SCHEDULES = {
    "lockstep": {"max_async_rollout": 0, "stream_gradients": "false"},
    "lockstep, streamed": {"max_async_rollout": 0, "stream_gradients": "true"},
    "one step ahead": {"max_async_rollout": 1, "stream_gradients": "false"},
    "larger batches": {"max_async_rollout": 0, "prompts_batch_size_for_trainer": 16},
    "fewer at a time": {"max_async_rollout": 0, "max_num_seqs": 16},
}
"""The first of them is measured."""
SETTINGS = """
environments = [{{ name = "./share.py:Share" }}]
[run]
name = "{name}"
number_of_steps = {steps}
[model]
model = {model}
[rollout]
group_size = 8
prompts_batch_size_for_trainer = 8
max_tokens = 256
[trainer]
learning_rate = 1e-9
seq_len = 1024
[inference]
inference_base_port = {port}
max_model_len = 512
"""
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


@dataclass(frozen=True)
class Found:
    """Seconds of a step of one schedule."""

    schedule: str
    real: float
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over real."""
        return self.simulated / self.real


def make_model(folder: Path) -> Path:
    """Write a random model of about 2M parameters, which ends an answer by chance."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
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


def compare(folder: Path, *, steps: int) -> list[Found]:
    """Train and simulate with each schedule."""
    (folder / "share.py").write_text(ENVIRONMENT)
    settings = SETTINGS.format(
        name="measured", steps=steps, model=json.dumps(str(folder / "model")), port=free_port()
    )
    (folder / "run.toml").write_text(settings)
    found: list[Found] = []
    for schedule, values in SCHEDULES.items():
        name = schedule.replace(", ", "-").replace(" ", "-")
        flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        command("train", folder, ["--run.name", name, *flags])
        rows = RunFolder(folder / "runs" / name).metrics()
        if not found:
            measured = str(folder / "runs" / name)
        said = command(
            "simulate",
            folder,
            [
                *("--gpus", "2", "--servers", "1", "--steps", str(steps), "--json"),
                *("--speeds-of", measured, "--lengths-of", measured, *flags),
            ],
        )
        real = statistics.fmean(row["time/step_s"] for row in rows[WARM_UP:])
        found.append(Found(schedule, real, json.loads(said)["chosen"]["step_s"]))
        one = found[-1]
        print(
            f"{schedule:<20} real {one.real:6.3f} s, simulated {one.simulated:6.3f} s, "
            f"ratio {one.ratio:.2f}",
            flush=True,
        )
    return found


PAGE = """# Simulated steps beside real ones

A model of 2M parameters, one vLLM server and one trainer rank on CPU, {steps} steps of each
schedule. Speeds and lengths were measured in the first run alone (`simulate --speeds-of`).

{table}

{{facts}}
"""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="Simulated steps beside real ones, on CPU.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    options = parser.parse_args()
    steps = 12 if options.quick else options.steps
    facts = facts_of_run(f"python benchmarks/bench_simulation.py --steps {steps}", "torch")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        found = compare(Path(folder), steps=steps)
    rows = [
        [one.schedule, f"{one.real:.3f} s", f"{one.simulated:.3f} s", f"{one.ratio:.2f}"]
        for one in found
    ]
    head = ["schedule", "real step", "simulated step", "simulated / real"]
    page = PAGE.format(steps=steps, table=table(head, rows))
    if not options.quick:
        write_results("simulation", page, facts, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
