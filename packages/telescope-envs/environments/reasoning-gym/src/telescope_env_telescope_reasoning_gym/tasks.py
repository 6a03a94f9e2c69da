"""The tasks of the reasoning-gym package: by name, endless, each entry with its verifier."""

import hashlib
import importlib
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from telescope_core.errors import ConfigError, unknown_name
from telescope_core.types import JsonValue
from telescope_env_telescope_reasoning_gym.generate import BATCH, UNSTEADY, generated
from telescope_env_telescope_reasoning_gym.guards import may_be_judged

with warnings.catch_warnings():
    # One of its dependencies warns when it is compiled, which is at the first import.
    warnings.simplefilter("ignore", SyntaxWarning)
    _factory: Any = importlib.import_module("reasoning_gym.factory")

DATASETS: Mapping[str, tuple[type, type]] = _factory.DATASETS
create_dataset: Callable[..., Any] = _factory.create_dataset
MIX = "composite"
"""The package's own mix of tasks, for which this environment takes several names."""
_CHUNK = 1000
"""Entries of one dataset object: some tasks make a table of their size when they are opened."""
_MAX_OPEN = 16
_MAX_ENTRIES = 4096
_GOLD_ELSEWHERE = ("possible_answer", "example_answer", "example_correct_answer")
"""Where an entry has an answer that earns the maximum, when `answer` is empty."""

Entry = Mapping[str, Any]


def task_names() -> list[str]:
    """Return every task of the installed package."""
    return sorted(name for name in DATASETS if name != MIX)


def read_tasks(text: str) -> tuple[str, ...]:
    """Return the tasks that a setting names: one, several after commas, or `all`."""
    if text.strip() == "all":
        return tuple(task_names())
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name == MIX:
            raise ConfigError(
                f"task {MIX!r} is a mix of others: name those, separated by commas, such as "
                "'chain_sum,sudoku'"
            )
        if name not in DATASETS:
            raise unknown_name("task of reasoning-gym", name, task_names())
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"task must name tasks of reasoning-gym, each once, got {text!r}")
    return tuple(names)


def check_options(task: str, options: Mapping[str, JsonValue]) -> None:
    """Raise ConfigError for options that `task` does not take."""
    known = {field.name for field in fields(DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in known:
            raise unknown_name(f"option of task {task}", name, known)
    try:
        create_dataset(task, seed=0, size=1, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"options {dict(options)!r} do not fit task {task}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the package's verifier says of an answer."""

    score: float
    is_readable: bool
    """False when the verifier raised, or would have had to run the answer as a program."""


class TaskEntries:
    """The entries of some tasks in turn: position p is entry p // n of task p mod n."""

    def __init__(
        self, tasks: Sequence[str], options: Mapping[str, JsonValue], *, seed: int
    ) -> None:
        self._tasks = tuple(tasks)
        self._options = dict(options)
        self._seed = seed
        self._open: OrderedDict[tuple[str, int], Sequence[Entry]] = OrderedDict()
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._verifiers: dict[str, Any] = {}
        self._verdict = lru_cache(maxsize=_MAX_ENTRIES)(self._judge)
        # The package's objects keep state while they generate, and threads ask for entries.
        self._lock = threading.RLock()

    def task(self, position: int) -> str:
        """Return the task of a position."""
        return self._tasks[position % len(self._tasks)]

    def entry(self, position: int) -> Entry:
        """Return the entry at a position: question, answer, metadata."""
        with self._lock:
            if position not in self._entries:
                self._entries[position] = self._generated(position)
                if len(self._entries) > _MAX_ENTRIES:
                    self._entries.popitem(last=False)
            return self._entries[position]

    def is_usable(self, position: int) -> bool:
        """Whether the right answer, where there is one, may be judged.

        One that may not is `Integral(...)`, the question put back, where sympy found no better.
        """
        gold = self.gold(position)
        return gold is None or may_be_judged(self.task(position), gold)

    def gold(self, position: int) -> str | None:
        """Return an answer that earns the maximum; None for tasks that have only a verifier."""
        entry = self.entry(position)
        if entry["answer"] is not None:
            return str(entry["answer"])
        found = next(
            (entry["metadata"][key] for key in _GOLD_ELSEWHERE if key in entry["metadata"]), None
        )
        return found if found is None or isinstance(found, str) else json.dumps(found)

    def verdict(self, position: int, answer: str) -> Verdict:
        """Score `answer` with the task's own verifier; the last verdicts are remembered."""
        return self._verdict(position, answer)

    def _judge(self, position: int, answer: str) -> Verdict:
        task = self.task(position)
        if not may_be_judged(task, answer):
            return Verdict(score=0.0, is_readable=False)
        with self._lock:
            entry = self.entry(position)
            if task not in self._verifiers:
                self._verifiers[task] = create_dataset(task, seed=0, size=1, **self._options)
        try:
            score = float(self._verifiers[task].score_answer(answer, entry))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return Verdict(score=0.0, is_readable=False)
        return Verdict(score=score, is_readable=True)

    def _generated(self, position: int) -> Entry:
        task = self.task(position)
        size = BATCH if task in UNSTEADY else _CHUNK
        chunk, offset = divmod(position // len(self._tasks), size)
        key = (task, chunk)
        if key not in self._open:
            digest = hashlib.sha256(f"{self._seed}/{task}/{chunk}".encode()).digest()
            seed = int.from_bytes(digest[:4])
            if task in UNSTEADY:
                self._open[key] = generated(task, self._options, seed=seed)
            else:
                self._open[key] = create_dataset(task, seed=seed, size=size, **self._options)
            if len(self._open) > max(_MAX_OPEN, len(self._tasks)):
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key][offset]
