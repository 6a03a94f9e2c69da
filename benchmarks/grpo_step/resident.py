"""TRL's side of `make gpu-check`: one GPU, sampling by vLLM in TRL's own process.

Run: python -m grpo_step.resident MODEL FOLDER STEPS GROUPS GROUP_SIZE MAX_TOKENS. Prompts are
numbers and the reward falls with the length in characters, as in gpu_parts/lengths.py.
"""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_step.settings import save_records
from grpo_step.trl_peer import PLAIN, Recorder

MICRO_BATCH = 16
"""Rows that TRL trains at once."""


class _Lengths(Recorder):
    def score_of(self, text: str, answer: str) -> float:
        del answer
        return 1.0 / (1 + len(text))


def main() -> None:
    """Train and record the steps."""
    model, folder = sys.argv[1:3]
    steps, groups, size, max_tokens = map(int, sys.argv[3:])
    recorder = _Lengths()
    prompts = [
        {"prompt": [{"role": "user", "content": str(number * 7919 % 1000)}], "answer": ""}
        for number in range(steps * groups)
    ]
    settings = PLAIN | {"use_cpu": False, "bf16": True}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=recorder,
        args=GRPOConfig(
            output_dir=folder,
            seed=0,
            max_steps=steps,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=groups * size // MICRO_BATCH,
            num_generations=size,
            max_completion_length=max_tokens,
            learning_rate=1e-6,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            vllm_max_model_length=max_tokens + 256,
            model_init_kwargs={"dtype": "float32"},
            **settings,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[recorder],
    )
    trainer.train()
    save_records(Path(folder), recorder.records)


if __name__ == "__main__":
    main()
