"""TRL's side: `python -m grpo_step.trl_peer BLOCK.json`. Generation by transformers, on CPU.

Logging, saving, evaluation, gradient checkpointing and progress bars are off, and the whole batch
is one micro-batch: nothing slows it down that a user could turn off.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_step.addition import Addition, score
from grpo_step.settings import Block, StepRecord, load_block, save_records
from telescope_core import Split

PLAIN: dict[str, Any] = {
    "temperature": 1.0,
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "shuffle_dataset": False,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""TRL's settings for a plain step, whatever is trained."""


class Recorder(TrainerCallback):
    """Scores completions for TRL, and notes tokens, reward and time of each step."""

    __name__ = "addition"

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._began_s = self._scored_s = 0.0
        self._tokens = 0
        self._reward = 0.0

    def __call__(
        self, completions: list, answer: list[str], completion_ids: list, **_: Any
    ) -> list[float]:
        """Return the rewards; called once per step, between generation and training."""
        self._scored_s = time.time()
        rewards = [
            self.score_of(completion[0]["content"], expected)
            for completion, expected in zip(completions, answer, strict=True)
        ]
        self._tokens = sum(map(len, completion_ids))
        self._reward = sum(rewards) / len(rewards)
        return rewards

    def score_of(self, text: str, answer: str) -> float:
        """Return the reward of one completion."""
        return score(text, answer)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the start."""
        self._began_s = time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the step."""
        ended_s = time.time()
        parts = {"generate_s": self._scored_s - self._began_s, "train_s": ended_s - self._scored_s}
        self.records.append(
            StepRecord(ended_s=ended_s, tokens=self._tokens, reward=self._reward, parts=parts)
        )


def prompts_of(block: Block) -> Dataset:
    """Return the problems in the order in which Telescope draws them."""
    workload = block.workload
    environment = Addition.from_settings(workload.environment_settings(seed=block.seed))
    source = environment.examples(Split.TRAIN)
    examples = [source.example(index) for index in range(block.steps * workload.prompts)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": one.prompt}], "answer": one.answer}
            for one in examples
        ]
    )


def arguments_of(block: Block) -> GRPOConfig:
    """Return TRL's settings, equal to ours where both have them."""
    workload = block.workload
    return GRPOConfig(
        output_dir=block.folder,
        seed=block.seed,
        max_steps=block.steps,
        per_device_train_batch_size=workload.prompts * workload.group_size,
        gradient_accumulation_steps=1,
        num_generations=workload.group_size,
        num_iterations=1,
        max_completion_length=workload.max_tokens,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=workload.adam_betas[0],
        adam_beta2=workload.adam_betas[1],
        adam_epsilon=1e-8,
        **PLAIN,
        use_transformers_continuous_batching=bool(os.environ.get("GRPO_STEP_CONTINUOUS")),
    )


def main() -> None:
    """Train and record the steps."""
    block = load_block(Path(sys.argv[1]))
    torch.set_num_threads(block.threads)
    recorder = Recorder()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(block.model, dtype=torch.float32),
        reward_funcs=recorder,
        args=arguments_of(block),
        train_dataset=prompts_of(block),
        processing_class=AutoTokenizer.from_pretrained(block.model, padding_side="left"),
        callbacks=[recorder],
    )
    trainer.train()
    save_records(Path(block.folder), recorder.records)


if __name__ == "__main__":
    main()
