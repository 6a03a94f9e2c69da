"""Examples from tables: a dataset on the Hugging Face Hub, a local folder, or a local file.

The `datasets` library is imported only when a table is first read. Splits are disjoint by example
id: a held-out example is never in the training split, however the files are divided.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.examples import split_of
from telescope_core.types import Example, Message, Split

_PROMPT_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("answer", "solution")
DATASETS_VARIABLE = "TELESCOPE_DATASETS"
"""Names, as JSON, the folders that hold whole datasets: `repo@commit` -> folder. Their hashes were
checked when a bundle brought them."""
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """Which table to read, at which revision, and which fields hold prompts and answers."""

    path: str
    """Dataset id on the Hub, a local folder, or a local .json, .jsonl, .parquet or .csv file."""
    revision: str = ""
    """Commit of the dataset. Required on the Hub: a branch can move, which changes every score."""
    subset: str = ""
    """Name of the dataset's configuration; empty = the default one."""
    train_split: str = "train"
    """Empty = there is none, and the whole of eval_split is for evals."""
    eval_split: str = "test"
    """When it equals train_split, that split is divided by a hash of each example's id. A local
    file is divided this way, unless it is for evals only."""
    prompt_field: str = ""
    """Field with text or messages; empty = the first of question, problem and prompt that the
    table has."""
    answer_field: str = ""
    """Field with the answer; empty = the first of answer and solution that the table has. With
    neither, examples have no answer."""
    needs_answer: bool = True
    """Whether an empty answer field is an error."""
    cache_dir: str = ""
    """Folder for downloads; empty = the cache of the `datasets` library."""

    @property
    def local(self) -> Path | None:
        """The folder or file on this machine; None for a dataset on the Hub."""
        path = Path(self.path).expanduser()
        return path if path.exists() or path.suffix in _BUILDERS else None

    def revisions(self) -> dict[str, str]:
        """Return dataset id -> revision, for `Environment.dataset_revisions`; empty when local."""
        return {} if self.local is not None else {self.path: self.revision}


Row = Mapping[str, object]


class Table(Protocol):
    """The part of `datasets.Dataset` that is used here."""

    def __iter__(self) -> Iterator[Row]: ...
    def __getitem__(self, index: int) -> Row: ...


class DatasetSource:
    """One split of a table, read on first use.

    `make` turns a row into an example and chooses its id. By default the prompt and the answer
    come from the fields of `spec`, and the id is a hash of the prompt. When several rows have the
    same id, only the first one is used.
    """

    def __init__(
        self, spec: DatasetSpec, split: Split, *, make: Callable[[Row], Example] | None = None
    ) -> None:
        self._spec = spec
        self._split = split
        self._make = make
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    @property
    def num_examples(self) -> int | None:
        """Number of examples in this split, without duplicates."""
        return len(self._load().rows)

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end."""
        loaded = self._load()
        if not 0 <= index < len(loaded.rows):
            raise IndexError(f"example {index} of {len(loaded.rows)}")
        return loaded.make(loaded.table[loaded.rows[index]])

    def _load(self) -> "_Loaded":
        with self._lock:
            if self._loaded is None:
                self._loaded = _read_split(self._spec, self._split, self._make)
            return self._loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    table: Table
    rows: Sequence[int]
    make: Callable[[Row], Example]


def load_table(spec: DatasetSpec, split: str) -> Table:
    """Load one split with the `datasets` library; raises EnvironmentLoadError with advice."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise EnvironmentLoadError(
            f"dataset {spec.path!r} needs the `datasets` library, which is not installed; "
            "run: pip install 'telescope-core[datasets]'"
        ) from error
    try:
        load = cast(Callable[..., Table], datasets.load_dataset)
        return load(**_load_arguments(spec, split))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise EnvironmentLoadError(
            f"cannot load split {split!r} of dataset {spec.path!r} (subset {spec.subset or None!r},"
            f" revision {spec.revision or None!r}): {error}; check the id, the revision and the "
            "network (HF_TOKEN for one that is private or gated, HF_ENDPOINT for a mirror), or "
            "give a local folder or file"
        ) from error


def _load_arguments(spec: DatasetSpec, split: str) -> dict[str, Any]:
    local = spec.local or _brought(spec)
    common = {"name": spec.subset or None, "split": split, "cache_dir": spec.cache_dir or None}
    if local is None:
        if not spec.revision:
            raise ConfigError(
                f"dataset {spec.path!r} is not a local folder or file, and a dataset on the Hub "
                "needs a revision; set it to a commit, so that scores can be compared"
            )
        return {**common, "path": spec.path, "revision": spec.revision}
    if not local.exists():
        raise ConfigError(f"dataset file {spec.path!r} does not exist; check the path")
    if local.is_dir():
        return {**common, "path": str(local)}
    if local.suffix not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise ConfigError(f"dataset file {spec.path!r} must end in {known}; convert it")
    return {**common, "path": _BUILDERS[local.suffix], "data_files": str(local), "split": "train"}


def _brought(spec: DatasetSpec) -> Path | None:
    """Return the folder on this machine that holds this dataset at its commit, if there is one."""
    folders = cast(dict[str, str], json.loads(os.environ.get(DATASETS_VARIABLE, "{}")))
    folder = folders.get(f"{spec.path}@{spec.revision}")
    return Path(folder) if folder is not None and Path(folder).is_dir() else None


def _read_split(spec: DatasetSpec, split: Split, make: Callable[[Row], Example] | None) -> _Loaded:
    local = spec.local
    if local is not None and not local.is_dir():
        spec = replace(spec, train_split=spec.train_split and "train", eval_split="train")
    if split is Split.TRAIN and not spec.train_split:
        raise ConfigError(
            f"dataset {spec.path!r} is for evals and has no examples to train on; leave the train "
            "split out of splits(), or set train_split"
        )
    own = make or partial(example_of_row, spec=spec)
    table = load_table(spec, spec.eval_split if split is Split.EVAL else spec.train_split)
    ids = [own(row).id for row in table]
    rows = list(range(len(ids)))
    if spec.train_split == spec.eval_split:
        rows = [row for row in rows if split_of(ids[row]) is split]
    elif split is Split.TRAIN:
        held_out = {own(row).id for row in load_table(spec, spec.eval_split)}
        rows = [row for row in rows if ids[row] not in held_out]
    first = {ids[row]: row for row in reversed(rows)}
    return _Loaded(table, [row for row in rows if first[ids[row]] == row], own)


def example_of_row(row: Row, *, spec: DatasetSpec) -> Example:
    """Return the example in `row`: the fields of `spec`, with a hash of the prompt as its id."""
    prompt_field = _field(row, spec.prompt_field, _PROMPT_FIELDS)
    if prompt_field is None:
        names = spec.prompt_field or ", ".join(_PROMPT_FIELDS)
        raise ConfigError(
            f"dataset {spec.path!r} has no field {names}; set prompt_field to one of its fields: "
            f"{', '.join(row)}"
        )
    prompt = as_prompt(row[prompt_field])
    text = prompt if isinstance(prompt, str) else json.dumps(row[prompt_field], sort_keys=True)
    answer_field = _field(row, spec.answer_field, _ANSWER_FIELDS)
    if spec.answer_field and answer_field is None:
        raise ConfigError(
            f"dataset {spec.path!r} has no field {spec.answer_field!r}; set answer_field to one of "
            f"its fields: {', '.join(row)}"
        )
    answer = row[answer_field] if answer_field is not None else ""
    if answer_field is not None and spec.needs_answer and (answer is None or answer == ""):
        raise ConfigError(
            f"dataset {spec.path!r}: the row {text[:60]!r} has an empty answer field "
            f"{answer_field!r}; fill it, choose another answer_field, or set needs_answer=False"
        )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Example(id=digest, prompt=prompt, answer="" if answer is None else str(answer))


def as_prompt(value: object) -> str | tuple[Message, ...]:
    """Convert a prompt from a table: a list of {role, content} to messages, the rest to text."""
    if not isinstance(value, list | tuple):
        return str(value)
    turns = cast(Sequence[Mapping[str, Any]], value)
    return tuple(Message(role=turn["role"], content=str(turn["content"])) for turn in turns)


def _field(row: Row, wanted: str, usual: tuple[str, ...]) -> str | None:
    return next((name for name in ((wanted,) if wanted else usual) if name in row), None)
