"""`Job`: what the validating process asks a probe to do, as JSON."""

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["load", "reward", "scores", "leakage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One errand of one process."""

    kind: Kind
    factory: str
    """`module:Class`."""
    output: str
    """File that the answers go to."""
    num_examples: int
    """Of each split."""
    writable: list[str] = field(default_factory=list[str])
    """Folders that count as the environment's caches."""
    parent: int
    """Process id of who asks: the errand is over when it is."""
    cuts_network: bool = True
    has_secrets: bool = True
    """Whether declared secrets were passed on: not before it is known which."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Job":
        """Read what `text` returned."""
        return cls(**json.loads(text))

    def own_folders(self) -> list[str]:
        """Return the folders of the environment's package, without importing it."""
        spec = find_spec(self.factory.partition(":")[0].partition(".")[0])
        if spec is None:
            return []
        return [*(spec.submodule_search_locations or [str(Path(spec.origin or "").parent)])]
