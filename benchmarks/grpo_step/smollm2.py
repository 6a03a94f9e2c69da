"""Both sides of `bench_real_model.py`: `python -m grpo_step.smollm2 SIDE MODEL FOLDER STEPS`.

SmolLM2-135M learns sums and differences of one digit, 8 groups of 8, else as in
examples/smollm2.toml, which has sums alone.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_step.ours import save_run
from grpo_step.settings import save_records
from grpo_step.trl_peer import PLAIN, Recorder
from telescope_core import Split
from telescope_core.graders.mathematics import extract_answer, numbers_match
from telescope_env_telescope_math_reasoning.environment import MathReasoning
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.config import check_config
from telescope_train.plan.prepared import prepare
from telescope_train.run import run_training

ENVIRONMENT: dict[str, Any] = {"level": "digit", "max_digits": 1}
GROUPS, GROUP_SIZE, MAX_TOKENS = 8, 8, 24
RATE, WARM_UP_STEPS = 2e-5, 3
PORT = 8640
AHEAD = {"ours": 1, "ours-sync": 0, "ours-apart": 1}


def ours(side: str, model: str, folder: Path, steps: int) -> None:
    """Train with `run_training`; `ours-apart` computes the prompt of every rollout."""
    config = TrainConfig.model_validate(
        {
            "run": {"name": "run", "output_dir": str(folder), "number_of_steps": steps, "seed": 0},
            "model": {"model": model},
            "environments": [{"name": "math-reasoning", "env": ENVIRONMENT}],
            "rollout": {
                "group_size": GROUP_SIZE,
                "prompts_batch_size_for_trainer": GROUPS,
                "max_tokens": MAX_TOKENS,
                # TRL trains on groups of equal rewards too; leaving them out would be faster.
                "discard_group_zero_advantage": False,
            },
            "scheduling": {"max_async_rollout": AHEAD[side]},
            "trainer": {
                "learning_rate": RATE,
                "warmup_steps": WARM_UP_STEPS,
                "seq_len": 2048,
                "gradient_checkpointing": False,
                "share_prefixes": False if side == "ours-apart" else "auto",
            },
            "inference": {"inference_base_port": PORT, "max_model_len": 256},
            # TRL has both cores of the machine, so both of our processes may use both.
            "ray": {"ray_trainer_cpus_per_worker": 2, "ray_inference_cpus_per_worker": 2},
        }
    )
    check_config(config)
    run_training(prepare(config))
    save_run(folder)


class _Scored(Recorder):
    """Scores like the environment does."""

    def score_of(self, text: str, answer: str) -> float:
        return float(numbers_match(extract_answer(text), answer))


def trl(model: str, folder: Path, steps: int) -> None:
    """Train with TRL's `GRPOTrainer`: generation by transformers, on two threads."""
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    recorder = _Scored()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=recorder,
        args=GRPOConfig(
            output_dir=str(folder),
            seed=0,
            max_steps=steps,
            per_device_train_batch_size=GROUPS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            learning_rate=RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARM_UP_STEPS,
            **PLAIN,
        ),
        train_dataset=_prompts(steps),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[recorder],
    )
    trainer.train()
    save_records(folder, recorder.records)


def _prompts(steps: int) -> Dataset:
    """Return the problems in the order in which Telescope draws them."""
    environment = MathReasoning.from_settings(ENVIRONMENT)
    source = environment.examples(Split.TRAIN)
    examples = [source.example(index) for index in range(steps * GROUPS)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": environment.format_prompt(one)}],
                "answer": one.answer,
            }
            for one in examples
        ]
    )


def main() -> None:
    """Train one side and record its steps."""
    side, model, folder, steps = sys.argv[1:]
    if side == "trl":
        trl(model, Path(folder), int(steps))
    else:
        ours(side, model, Path(folder), int(steps))


if __name__ == "__main__":
    main()
