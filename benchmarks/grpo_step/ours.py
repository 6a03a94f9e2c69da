"""Telescope's side: `python -m grpo_step.ours BLOCK.json`.

A whole run of `run_training` with live vLLM and a trainer rank, read back from its run folder.
"""

import json
import sys
from pathlib import Path

from grpo_step.addition import NAME
from grpo_step.settings import Block, Side, StepRecord, load_block, save_records
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.config import check_config
from telescope_train.plan.prepared import prepare
from telescope_train.run import run_training

AHEAD: dict[Side, int] = {
    "ours-sync": 0,
    "ours-sync-whole": 0,
    "ours-async": 1,
    "ours-async-2": 2,
    "apart": 0,
    "apart-whole": 0,
}
TIMES = ("generate_s", "train_s", "sync_s", "wait_s")


def config_of(block: Block) -> TrainConfig:
    """Return the config of the run."""
    workload = block.workload
    config = TrainConfig.model_validate(
        {
            "run": {
                "name": "run",
                "output_dir": block.folder,
                "seed": block.seed,
                "number_of_steps": block.steps,
            },
            "model": {"model": block.model},
            "environments": [{"name": NAME, "env": workload.environment_settings(seed=block.seed)}],
            "rollout": {
                "group_size": workload.group_size,
                "prompts_batch_size_for_trainer": workload.prompts,
                "max_tokens": workload.max_tokens,
                # TRL trains on groups of equal rewards too; leaving them out would be faster.
                "discard_group_zero_advantage": False,
            },
            "scheduling": {
                "max_async_rollout": AHEAD[block.side],
                "stream_gradients": False if block.side.endswith("-whole") else "auto",
            },
            "trainer": {
                "learning_rate": workload.learning_rate,
                "adam_betas": workload.adam_betas,
                "gradient_checkpointing": False,
                # Rows that stay in the cache: same gradient, 5 % faster than one long row.
                "seq_len": 4096,
            },
            "inference": {"inference_base_port": block.port, "max_model_len": 512},
            "ray": {
                "ray_inference_cpus_per_worker": block.server_threads,
                "ray_trainer_cpus_per_worker": block.threads,
            },
        }
    )
    check_config(config)
    return config


def save_run(folder: Path) -> None:
    """Write the steps of the run in `folder`, as its metrics tell them."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    save_records(
        folder,
        [
            StepRecord(
                ended_s=row["time_s"],
                tokens=int(row["tokens/trained"]),
                reward=row["reward/mean"],
                parts={name: row[f"time/{name}"] for name in TIMES},
            )
            for row in rows
        ],
    )


def main() -> None:
    """Train and record the steps."""
    block = load_block(Path(sys.argv[1]))
    run_training(prepare(config_of(block)))
    save_run(Path(block.folder))


if __name__ == "__main__":
    main()
