"""Examples from tables: a dataset on the Hugging Face Hub, a local folder, or a local file.

The `datasets` library is imported only when a dataset or a folder is first read; a file, and the
text files of a dataset, are read by `telescope_core.examples.rows`. Splits are disjoint by example
id: a held-out example is never in the training split, however the files are divided.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, TelescopeError
from telescope_core.base.types import Example, Split
from telescope_core.examples.checks import checked_example
from telescope_core.examples.rows import (
    ANSWER_FIELDS,
    FILE_SUFFIXES,
    PROMPT_FIELDS,
    ArrowRows,
    Kept,
    Mark,
    Row,
    RowFields,
    Table,
    as_prompt,
    distinct,
    example_of,
    mark_of,
    read_rows,
)
from telescope_core.examples.sources import split_of

__all__ = ["DatasetSource", "DatasetSpec", "Row", "Table", "as_prompt", "example_of_row"]
DATASETS_VARIABLE = "TELESCOPE_DATASETS"
"""Environment variable with a JSON object: `repo@commit` -> folder of the whole dataset. The hashes
were checked when a bundle brought the dataset."""
_HUB_TRIES = 2
_HUB_S = 5.0
"""Time limit of each try, for the connection and for the answer."""
_PLAIN_CSV = frozenset({"name", "version", "data_dir", "data_files", "description", "features"})
_MAY_SAY = {"csv": _PLAIN_CSV | {"sep", "delimiter"}, "json": _PLAIN_CSV}
"""Options of text files that a dataset's card may set; others would change how they are read."""
_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
"""Files that the library's `save_to_disk` writes: the first two beside the rows of one split, the
last beside the folders of several."""
_NO_DATA = ("config.json", _INFO, "dataset_infos.json", _SPLITS)
"""Files beside the data, which the library does not read as data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A table, its revision, and its fields for prompts and answers."""

    path: str
    """Dataset id on the Hub, a local folder, or a local file: .jsonl, .json, .csv, .tsv or
    .parquet."""
    revision: str = ""
    """Commit of the dataset. Required on the Hub: a branch can move, which changes every score."""
    subset: str = ""
    """Name of the dataset's configuration; empty = the default one."""
    train_split: str = "train"
    """Name of the split; empty = there is none, and the whole of eval_split is for evals."""
    eval_split: str = "test"
    """If it equals train_split, that split is divided by a hash of each example's id. A local
    file is divided this way, unless it is for evals only."""
    prompt_field: str = ""
    """Field with text or messages; empty = the first of question, problem and prompt that the
    table has."""
    answer_field: str = ""
    """Field with the answer; empty = the first of answer and solution that the table has. With
    neither, examples have no answer."""
    needs_answer: bool = True
    """Whether an empty answer field is an error."""
    cluster_field: str = ""
    """Field with the cluster of the example, see `Example.cluster`; empty = `cluster`, if the table
    has it."""
    cache_dir: str = ""
    """Folder for downloads; empty = the cache of the `datasets` library."""

    @property
    def local(self) -> Path | None:
        """The folder or file on this machine; None for a dataset on the Hub."""
        path = Path(self.path).expanduser()
        return path if path.exists() or path.suffix in FILE_SUFFIXES else None

    def revisions(self) -> dict[str, str]:
        """Return dataset id -> revision, for `Environment.dataset_revisions`; empty when local."""
        return {} if self.local is not None else {self.path: self.revision}


class DatasetSource:
    """One split of a table, read on first use.

    `make` turns a row into an example and chooses its id. By default the prompt and the answer
    come from the fields of `spec`, all other fields are in `info`, and the id is a hash of the
    prompt. Rows that are equal in everything are one example. Rows that have the same id, and
    differ, get ids that begin with it.
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
        return len(self._load().kept)

    @property
    def num_dropped(self) -> int:
        """Number of rows left out: they repeat others, or the eval split holds them out."""
        return self._load().num_dropped

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end."""
        loaded = self._load()
        if not 0 <= index < len(loaded.kept):
            raise IndexError(f"example {index} of {len(loaded.kept)}")
        one = loaded.kept[index]
        return replace(loaded.make(loaded.table[one.index]), id=one.id)

    def _load(self) -> "_Loaded":
        with self._lock:
            if self._loaded is None:
                self._loaded = _read_split(self._spec, self._split, self._make)
            return self._loaded


@dataclass(frozen=True, slots=True)
class _Loaded:
    table: Table
    kept: Sequence[Kept]
    num_dropped: int
    make: Callable[[Row], Example]


def load_table(spec: DatasetSpec, split: str) -> Table:
    """Load one split of a table as it was written; raises EnvironmentLoadError with advice.

    A file is read by `read_rows`, as are the text files of a dataset: the `datasets` library would
    guess types, and convert dates, numbers and words such as NA wrongly.
    """
    local = spec.local or _brought(spec)
    if local is None and not spec.revision:
        raise ConfigError(
            f"dataset {spec.path!r} is not a local folder or file, and a dataset on the Hub "
            "needs a revision; set it to a commit, so that scores can be compared"
        )
    if local is not None and not local.exists():
        advice = (
            f"addresses and patterns are not read: give one file ({', '.join(FILE_SUFFIXES)}), a "
            "folder of files, or the id of a dataset on the Hub, such as 'owner/name'"
            if "://" in spec.path or any(sign in spec.path for sign in "*?[")
            else "check the path"
        )
        raise ConfigError(f"dataset file {spec.path!r} does not exist; {advice}")
    if local is not None and not local.is_dir():
        return read_rows(local)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise EnvironmentLoadError(
            f"dataset {spec.path!r} needs the `datasets` library, which is not installed; "
            "run: pip install 'telescope-core[datasets]'"
        ) from error
    is_saved = spec.local is not None and _is_saved(spec.local)
    common = {"name": spec.subset or None, "cache_dir": spec.cache_dir or None}
    if local is None:
        common["revision"] = spec.revision
    library, path = cast(Any, datasets), spec.path if local is None else str(local)
    try:
        if is_saved:
            return _as_saved(library, spec, split)
        if local is None:
            _require_hub(path, Path(spec.cache_dir or library.config.HF_DATASETS_CACHE))
            builder = _hub_builder(library, path, common)
        else:
            files = [] if spec.local is None else _files_of_one_format(local)
            builder = library.load_dataset_builder(path, **common)
            _require_all(files, builder)
        if builder.name in _MAY_SAY:
            return _as_written(library, builder, split, spec.cache_dir)
        return ArrowRows(library.load_dataset(path, split=split, **common))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        advice = (
            "check the id, the revision and the network (HF_TOKEN for one that is private or "
            "gated, HF_ENDPOINT for a mirror), or give a local folder or file"
            if local is None
            else "name one of its splits, or write the folder again with save_to_disk"
            if is_saved
            else "a folder needs data files, such as .jsonl or .parquet, whose names give its "
            "splits, such as train and test; add or rename them, or give a file"
        )
        raise EnvironmentLoadError(
            f"cannot load split {split!r} of dataset {spec.path!r} (subset {spec.subset or None!r},"
            f" revision {spec.revision or None!r}): {error}; {advice}"
        ) from error


def _is_saved(folder: Path) -> bool:
    """Return whether the library's `save_to_disk` wrote the folder."""
    has = [(folder / name).is_file() for name in (_SPLITS, _STATE, _INFO)]
    return has[0] or all(has[1:])


def _as_saved(library: Any, spec: DatasetSpec, split: str) -> Table:
    """Return the rows of a folder that `save_to_disk` wrote.

    Read as a folder of files, its splits would get other names (`train_sft` would be `train`), or
    none. A single split is `train`, as the files of a folder are whose names give no split.
    """
    if spec.subset:
        raise ValueError("it was written by save_to_disk and has no subsets; remove the subset")
    found = library.load_from_disk(str(spec.local))
    splits = {"train": found} if isinstance(found, library.Dataset) else dict(found)
    sizes = {str(name): len(rows) for name, rows in splits.items()}
    wanted = library.ReadInstruction.from_spec(split).to_absolute(sizes)
    parts = [splits[one.splitname].select(range(one.from_, one.to)) for one in wanted]
    # A dataset keeps the format of whoever saved it, such as tensors or a choice of columns.
    return ArrowRows(library.concatenate_datasets(parts).with_format(None))


def _files_of_one_format(folder: Path) -> list[Path]:
    """Return the data files below `folder`; empty if its card chooses among them.

    Raises ConfigError for files of two formats, of which the library would read one.
    """
    found: dict[str, list[Path]] = {}
    for parent, folders, names in os.walk(folder):
        # Hidden to the library.
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        for path in (Path(parent, name) for name in sorted(names)):
            is_data = not path.name.startswith(".") and path.name not in _NO_DATA
            is_data &= path.name != _STATE or _INFO not in names
            if is_data and (kind := _FORMATS.get(path.suffix)) is not None:
                found.setdefault(kind, []).append(path)
    import huggingface_hub

    card = folder / "README.md"
    try:
        about = cast(Any, huggingface_hub).metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, import_module("yaml").YAMLError) as error:
        raise ValueError(f"{card} cannot be read: {error}") from error
    if "configs" in (about or {}):
        return []
    if len(found) < 2:
        return [path for paths in found.values() for path in paths]
    names = {kind: ", ".join(str(p.relative_to(folder)) for p in found[kind]) for kind in found}
    files = "; ".join(f"{kind}: {names[kind]:.80}" for kind in sorted(names))
    raise ConfigError(
        f"dataset folder {str(folder)!r} has data files of {len(found)} formats ({files}), and "
        "only those of one would be read; move the others elsewhere, convert them, or give a file"
    )


def _require_all(files: Sequence[Path], builder: Any) -> None:
    """Refuse files that the library leaves out, since their names are of none of its splits."""
    named = cast("dict[str, list[str]]", builder.config.data_files or {}).values()
    read = {os.path.realpath(path) for paths in named for path in paths}
    left_out = [path.name for path in files if os.path.realpath(path) not in read]
    if read and left_out:
        raise ConfigError(
            f"dataset folder {str(builder.base_path)!r} has files that no split of it holds "
            f"({', '.join(left_out):.80}), since other names say their split; give each file a "
            "name such as train-more.jsonl or test.jsonl, move it elsewhere, or name all files "
            "under configs in README.md"
        )


def _require_hub(name: str, cache: Path) -> None:
    """Raise OSError within some ten seconds if the Hub cannot be asked and nothing of it is here.

    The library itself tries for most of a minute.
    """
    import huggingface_hub
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    copies = (
        cache / name.replace("/", "___"),
        Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}",
    )
    if constants.HF_HUB_OFFLINE or any(one.exists() for one in copies):
        return
    url = hf_hub_url(name, "README.md", repo_type="dataset")
    for left in reversed(range(_HUB_TRIES)):
        try:
            cast(Any, huggingface_hub).get_hf_file_metadata(url, timeout=_HUB_S)
            return
        except HfHubHTTPError:
            return  # the Hub has answered, and the library says more about it
        except (HTTPError, OSError) as error:
            if not left:
                raise OSError(
                    f"{constants.ENDPOINT} cannot be reached ({error}), and no copy of the dataset "
                    "is on this machine; offline, copy the cache of a machine that has it (HF_HOME)"
                ) from error


def _hub_builder(library: Any, path: str, common: dict[str, str | None]) -> Any:
    """Return the library's builder of a dataset on the Hub: it knows the files and their format.

    Without a network, the library knows only tables that it made itself, with guessed types. Text
    files that were downloaded earlier are then used directly.
    """
    builder, problem = None, None
    try:
        builder = library.load_dataset_builder(path, **common)
        if builder.name != "cache":
            return builder
    except OSError as error:
        problem = error
    import huggingface_hub

    try:
        folder = cast(Any, huggingface_hub).snapshot_download(
            path, repo_type="dataset", revision=common["revision"], local_files_only=True
        )
        kept = library.load_dataset_builder(folder, **{**common, "revision": None})
    except FileNotFoundError:  # also that of a snapshot which is not there
        kept = None
    if kept is not None and kept.name in _MAY_SAY:
        return kept
    if problem is not None:
        raise problem
    return builder


def _as_written(library: Any, builder: Any, split: str, cache_dir: str) -> Table:
    """Return the rows of a csv or json dataset, whose file names and splits the library finds.

    `split` may have slices, such as `train[:100]`.
    """
    config = builder.config
    usual = type(config)()
    for name in (field.name for field in fields(config)):
        said = getattr(config, name)
        if name not in _MAY_SAY[builder.name] and said != getattr(usual, name):
            raise ValueError(f"its card says {name}={said!r} of its files, which is not supported")
    kind, delimiter = f".{builder.name}", getattr(config, "sep", "")
    extracted = os.path.join(cache_dir, "downloads") if cache_dir else None
    download = library.DownloadManager(download_config=library.DownloadConfig(cache_dir=extracted))
    rows: dict[str, list[Row]] = {}
    for name, addresses in config.data_files.items():
        files = download.iter_files(download.download_and_extract(list(addresses)))
        tables = (read_rows(Path(file), kind=kind, delimiter=delimiter) for file in files)
        rows[str(name)] = list(chain.from_iterable(tables))
    sizes = {name: len(part) for name, part in rows.items()}
    wanted = library.ReadInstruction.from_spec(split).to_absolute(sizes)
    return list(chain.from_iterable(rows[one.splitname][one.from_ : one.to] for one in wanted))


def _brought(spec: DatasetSpec) -> Path | None:
    """Return the folder of this dataset at its commit on this machine; None if there is none."""
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
    name = spec.eval_split if split is Split.EVAL else spec.train_split
    table = load_table(spec, name)
    marks = _marks(table, own, f"split {name!r} of {spec.path!r}")
    kept = distinct(marks)
    if spec.train_split == spec.eval_split:
        kept = [one for one in kept if split_of(one.split_key) is split]
        num_rows = sum(1 + one.num_repeats for one in kept)
    else:
        num_rows = len(marks)
        if split is Split.TRAIN:
            where = f"split {spec.eval_split!r} of {spec.path!r}"
            held_out = {mark.id for mark in _marks(load_table(spec, spec.eval_split), own, where)}
            kept = [one for one in kept if marks[one.index].id not in held_out]
    return _Loaded(table, kept, num_rows - len(kept), own)


def _marks(table: Table, make: Callable[[Row], Example], where: str) -> list[Mark]:
    marks: list[Mark] = []
    for number, row in enumerate(table, 1):
        about = f"row {number} of {where}"
        try:
            marks.append(mark_of(checked_example(make(row), where="its example")))
        except TelescopeError as error:
            raise type(error)(f"{about}: {error}") from error
    return marks


def example_of_row(row: Row, *, spec: DatasetSpec) -> Example:
    """Return the example in `row`: the fields of `spec`, with a hash of the prompt as its id."""
    fields = RowFields(
        prompt=(spec.prompt_field,) if spec.prompt_field else PROMPT_FIELDS,
        answer=(spec.answer_field,) if spec.answer_field else ANSWER_FIELDS,
        cluster=spec.cluster_field or "cluster",
        has_ids=False,
    )
    if not row:
        raise ConfigError(f"dataset {spec.path!r} has an empty row; remove it")
    if not any(name in row for name in fields.prompt):
        raise ConfigError(
            f"dataset {spec.path!r} has no field {', '.join(fields.prompt)}; set prompt_field to "
            f"one of its fields: {', '.join(row)}"
        )
    named = {"answer_field": spec.answer_field, "cluster_field": spec.cluster_field}
    for setting, field in named.items():
        if field and field not in row:
            raise ConfigError(
                f"dataset {spec.path!r} has no field {field!r}; set {setting} to one of its "
                f"fields: {', '.join(row)}"
            )
    example = example_of(row, where=f"dataset {spec.path!r}", fields=fields)
    field = next((name for name in fields.answer if name in row), None)
    if field is not None and spec.needs_answer and not example.answer:
        raise ConfigError(
            f"dataset {spec.path!r}: the row {str(example.prompt)[:60]!r} has an empty answer "
            f"field {field!r}; fill it, choose another answer_field, or set needs_answer=False"
        )
    return example
