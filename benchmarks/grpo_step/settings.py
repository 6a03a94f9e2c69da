"""What is measured: the workloads, and one block = one side training one workload once."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Side = Literal[
    "ours-sync", "ours-sync-whole", "ours-async", "ours-async-2", "trl", "apart", "apart-whole"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task and the settings that both sides share."""

    name: str
    max_first: int
    max_second: int
    by_counting: bool
    shows_sum: bool = False
    max_tokens: int
    """Longest completion."""
    steps: int
    prompts: int = 16
    group_size: int = 16
    learning_rate: float = 2e-4
    adam_betas: tuple[float, float] = (0.9, 0.99)
    start_accuracy: float = 0.2
    """The warm start ends when a sampled answer is expected to be the gold one this often.

    From a weaker one, all sides learn so slowly that their curves cannot be told apart.
    """

    def environment_settings(self, seed: int) -> dict[str, int]:
        """Return the settings of the environment; `seed` orders its problems."""
        return {
            "max_first": self.max_first,
            "max_second": self.max_second,
            "by_counting": self.by_counting,
            "shows_sum": self.shows_sum,
            "seed": seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One side, one seed, one workload: a process of its own."""

    side: Side
    workload: Workload
    seed: int
    steps: int
    model: str
    folder: str
    """Where the block writes; it must not exist yet."""
    threads: int
    """CPU threads of the trainer."""
    server_threads: int
    """CPU threads of the vLLM server; TRL has none."""
    port: int

    @property
    def label(self) -> str:
        """Unique in one run of the benchmark."""
        return f"{self.workload.name}-{self.side}-seed{self.seed}"

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))


def load_block(path: Path) -> Block:
    """Read what `Block.save` wrote."""
    row = json.loads(path.read_text())
    workload = row.pop("workload")
    workload["adam_betas"] = tuple(workload["adam_betas"])
    return Block(workload=Workload(**workload), **row)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a block."""

    ended_s: float
    """Wall clock when the whole step was over; steps follow each other without a gap."""
    tokens: int
    """Completion tokens trained on."""
    reward: float
    """Mean reward of its rollouts."""
    parts: dict[str, float]
    """Where its time went, seconds, as far as the side says."""


def save_records(folder: Path, records: list[StepRecord]) -> None:
    """Write the steps of a block."""
    (folder / "steps.json").write_text(json.dumps([asdict(record) for record in records]))


def load_records(folder: Path) -> list[StepRecord]:
    """Read them back."""
    return [StepRecord(**row) for row in json.loads((folder / "steps.json").read_text())]
