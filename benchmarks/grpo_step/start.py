"""The model both sides start from: `python -m grpo_step.start BLOCK.json MODEL_FOLDER`.

A new tiny model, taught the form of an answer on gold answers, and stopped early.
"""

import sys
from pathlib import Path

from grpo_step.addition import NAME
from grpo_step.settings import load_block
from telescope_train.sft.config import SftConfig, SftEnvironment
from telescope_train.sft.run import SftRow, run_sft

SFT_SEED = 1000
"""The warm start sees other problems than the training after it."""


def main() -> None:
    """Make the model."""
    block, output = load_block(Path(sys.argv[1])), Path(sys.argv[2])
    workload = block.workload
    config = SftConfig(
        model=f"{output}-base",
        make_tiny_model=True,
        output=str(output),
        environments=(SftEnvironment(name=NAME, env=workload.environment_settings(seed=SFT_SEED)),),
        number_of_steps=600,
        batch_size=32,
        lr_scheduler="constant",
        stop_at_accuracy=workload.start_accuracy,
        seed=0,
    )
    run_sft(config, on_row=_show)


def _show(row: SftRow) -> None:
    print(f"step {row.step}: accuracy {row.accuracy:.3f}, {row.metrics['time_s']:.0f} s")


if __name__ == "__main__":
    main()
