"""`Job`: the task of a probe, as the validating process sends it in JSON; and its `Answers`.

Answers are JSON lines in a file, so that they survive the death of the probe.
"""

import json
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

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
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the environment that were given; the others have their defaults."""
    has_secrets: bool = True
    """Whether declared secrets were passed on, which requires that their names are known."""

    def text(self) -> str:
        """Return the job as JSON.

        Without settings the field is left out, because a telescope-core from before it may read it.
        """
        told = asdict(self)
        if not self.settings:
            del told["settings"]
        return json.dumps(told)

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


_MAX_TEXT = 600


class Answers:
    """Writes one line for each result; the validating process reads them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._has_found: set[str] = set()

    def stage(self, check: str) -> None:
        """Report which check is running, in case the process dies of it."""
        self._write(kind="stage", check=check)

    def passed(self, check: str) -> None:
        """Report that `check` was completed."""
        self._write(kind="passed", check=check)

    def found(self, check: str, text: str, *, example_id: str = "", completion: str = "") -> None:
        """Report one problem that `check` found."""
        self._has_found.add(check)
        self._write(
            kind="found",
            check=check,
            text=text[:_MAX_TEXT],
            example_id=example_id,
            completion=completion[:2000],
        )

    def not_applicable(self, check: str, reason: str) -> None:
        """Report that `check` does not apply to this environment."""
        self._write(kind="not applicable", check=check, reason=reason)

    def inconclusive(self, check: str, reason: str) -> None:
        """Report why the attempts of `check` allow no conclusion."""
        self._write(kind="inconclusive", check=check, reason=reason)

    def not_run(self, check: str, reason: str) -> None:
        """Report why `check` cannot be run."""
        self._write(kind="not run", check=check, reason=reason)

    def fact(self, name: str, value: float | str) -> None:
        """Report a measurement."""
        self._write(kind="fact", name=name, value=value)

    def data(self, name: str, value: Any) -> None:
        """Pass a value to the validating process."""
        self._write(kind="data", name=name, value=value)

    def has_found(self, check: str) -> bool:
        """Return whether `check` has found a problem so far."""
        return check in self._has_found

    @contextmanager
    def doing(self, check: str) -> Generator[None]:
        """Run a check; an error from the environment's code becomes a finding."""
        self.stage(check)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a boundary: whatever the author's code raises
            self.found(check, described(error))
        self.passed(check)

    def close(self) -> None:
        """Report that the probe finished."""
        self._write(kind="end")
        self._file.close()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line, ensure_ascii=True) + "\n")


def described(error: BaseException) -> str:
    """Return an exception and the place where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    notes = "; ".join(getattr(error, "__notes__", ()))
    text = f"{type(error).__name__}: {error}{where}{f'; {notes}' if notes else ''}"
    return " ".join(text.split())
