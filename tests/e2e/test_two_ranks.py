"""Two trainer ranks that share each row and train adapters, through the real command."""

import sys
from pathlib import Path

import pytest

from telescope_core.records import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

PAIR_RUN = """
[run]
name = "pair"
number_of_steps = 4
[[environments]]
name = "math-reasoning"
weight = 0.7
env = { level = "digit", operations = "+", instruction = "" }
[[environments]]
name = "countdown"
weight = 0.3
env = { min_numbers = 3, max_numbers = 3, max_number = 9, instruction = "" }
[rollout]
prompts_batch_size_for_trainer = 8
discard_group_zero_advantage = false
[scheduling]
max_async_rollout = 0
[trainer]
trainer_num_workers = 2
"""


@pytest.mark.nightly
@pytest.mark.parametrize("transfer", ["merged", "adapter"])
def test_two_ranks_share_each_row_and_train_adapters(
    tmp_path: Path, tiny_model: Path, transfer: str
) -> None:
    """Context parallelism, LoRA and a reference model together, through the real command."""
    flags = ["--fsdp_context_parallel_size", "2", "--use_lora", "--lora_rank", "4"]
    flags += ["--lora_transfer", transfer]
    flags += ["--learning_rate", "1e-2", "--kl_penalty_tau", "0.01", "--number_of_steps", "3"]
    finish([*train_command(tmp_path, tiny_model, PAIR_RUN), *flags, "--json"], tmp_path)
    folder = RunFolder.open(tmp_path / "runs" / "pair")
    rows = folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    assert "attention packed_blocks" in (folder.path / "self_tests.json").read_text()
    found = {(span.source, span.step) for span in folder.timeline() if "reference" in span.name}
    assert found == {(f"rank {rank}", step) for rank in (0, 1) for step in (1, 2, 3)}
    final = folder.checkpoints_path / "final" / "hf"
    assert (final / "adapter" / "adapter_config.json").is_file()
