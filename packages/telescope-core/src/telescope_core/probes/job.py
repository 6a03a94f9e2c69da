"""`Job`: the task of a probe, as the validating process sends it in JSON."""

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["load", "reward", "scores", "leakage", "grading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One task of one process."""

    kind: Kind
    factory: str
    """`module:Class`."""
    output: str
    """File to write the answers to."""
    num_examples: int
    """Number of examples of each split."""
    writable: list[str] = field(default_factory=list[str])
    """Folders that count as the environment's caches, in which it may write."""
    cuts_network: bool = True
    has_secrets: bool = True
    """Whether declared secrets were passed on, which requires that their names are known."""

    def text(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Job":
        """Read a job from the JSON that `text` returned."""
        return cls(**json.loads(text))

    def own_folders(self) -> list[str]:
        """Return the folders of the environment's package, without importing it."""
        spec = find_spec(self.factory.partition(":")[0].partition(".")[0])
        if spec is None:
            return []
        return [*(spec.submodule_search_locations or [str(Path(spec.origin or "").parent)])]
