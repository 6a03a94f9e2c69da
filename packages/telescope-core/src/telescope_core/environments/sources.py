"""`source_of`: the examples of one split, from whatever an author gives, each one checked.

An author gives an example source, or a list, a generator or a file. Any error of the author's code
becomes one that names the split, the example, the file and the line. Code that reads a source must
be called in a thread, because it may read files.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

from telescope_core.base.code_places import raised_at
from telescope_core.base.errors import DuplicateIdError, EnvironmentLoadError, TelescopeError
from telescope_core.base.protocols import ExampleSource
from telescope_core.base.types import Example, Split
from telescope_core.environments.author_errors import contained
from telescope_core.environments.calls import ADVICE, Caller
from telescope_core.environments.running import noting
from telescope_core.examples import ListSource, split_of
from telescope_core.examples.checks import checked_example
from telescope_core.examples.rows import Kept, Row, distinct, example_of, mark_of, read_rows

Examples: TypeAlias = ExampleSource | Iterable[Example | Row | str] | str | Path
"""Types that an author may return: a source, an iterable of examples, rows or prompts, or a
file."""
MAX_LISTED = 1_000_000
"""Most examples that a list or a generator may give."""
_MAX_REMEMBERED = 100_000
_MAX_KEPT = 512
"""Most examples kept in memory. The rollouts of a group and its group reward need the same example
soon after each other."""


class CheckedSource:
    """The examples of an author's own source, read lazily and checked one by one."""

    def __init__(self, source: ExampleSource, *, where: str) -> None:
        self._source = source
        self._where = where
        self._index_of: dict[str, int] = {}

    @property
    def num_dropped(self) -> int:
        """Number of rows of its tables that are not examples of the split, if it reports them."""
        said = getattr(self._source, "num_dropped", 0)
        return said if isinstance(said, int) and said > 0 else 0

    @property
    def num_examples(self) -> int | None:
        """Number of examples in the split; None = endless."""
        try:
            with contained():
                size = cast(Any, self._source.num_examples)
        except Exception as error:
            raise _placed(f"num_examples of {self._where}", error) from error
        if size is None or (isinstance(size, int) and size >= 0):
            return size
        raise EnvironmentLoadError(
            f"num_examples of {self._where} must be a number, or None for endless, got {size!r}"
        )

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end of a finite split."""
        size = self.num_examples
        if size is not None and not 0 <= index < size:
            raise IndexError(f"example {index} of {size}")
        where = f"example {index} of {self._where}"
        try:
            with contained():
                found = self._source.example(index)
        except Exception as error:
            raise _placed(where, error) from error
        example = checked_example(found, where=where)
        is_remembered = example.id in self._index_of or len(self._index_of) < _MAX_REMEMBERED
        if size is not None and is_remembered:
            other = self._index_of.setdefault(example.id, index)
            if other != index:
                raise _same_id(self._where, example.id, other, index)
        return example


class ExampleReader:
    """Reads the sources that an author's `examples` returns, and their examples, each one checked.

    A source is read once, and an example only once for its group: concurrent requests for it share
    one read, in a thread of `caller`. `owner` names the environment in errors. Paths are relative
    to `folder`.
    """

    def __init__(
        self, examples: Callable[[Split], object], caller: Caller, *, owner: str, folder: Path
    ) -> None:
        self._examples = examples
        self._caller = caller
        self._owner = owner
        self._folder = folder
        self._lock = threading.Lock()
        self._sources: dict[Split, ExampleSource] = {}
        self._known: dict[tuple[Split, int], Example] = {}
        self._reading: dict[tuple[Split, int], asyncio.Task[Example]] = {}

    def source(self, split: Split) -> ExampleSource:
        """Return the source of `split`; waits while another thread is reading it.

        It may read files, so call it in a thread.
        """
        with self._lock:
            if split not in self._sources:
                where = f"the {split} examples of {self._owner}"
                try:
                    with contained(), noting(self._examples, "data"):
                        given = self._examples(split)
                except Exception as error:
                    raise _placed(where, error) from error
                self._sources[split] = source_of(given, where=where, folder=self._folder)
            return self._sources[split]

    async def get(self, split: Split, index: int) -> Example:
        """Return example `index` of `split`."""
        key = (split, index)
        if key in self._known:
            return self._known[key]
        task = self._reading.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.create_task(self._read(split, index))
            self._reading[key] = task
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, split: Split, index: int) -> Example:
        def read() -> Example:
            source = self.source(split)
            with noting(source.example, "data"):
                return source.example(index)

        found = await self._caller.in_thread(read)
        if len(self._known) >= _MAX_KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[split, index] = found
        return found


class _ReadOnce:
    """The items of an iterator, which is read once, however often and by whomever they are asked.

    An error that it raised is raised each time: afterwards the iterator would only seem to end.
    """

    def __init__(self, items: Iterator[object]) -> None:
        self._items = items
        self._read: list[object] = []
        self._error: Exception | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[object]:
        for index in count():
            with self._lock:
                if index == len(self._read) and not self._reads_another():
                    return
            yield self._read[index]

    def _reads_another(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            self._read.append(next(self._items))
        except StopIteration:
            return False
        except Exception as error:
            self._error = error
            raise
        return True


_KEEPING = threading.Lock()


def kept_data(environment: Any) -> Any:
    """Return `data` of an environment, with iterators that give the same to all who read them.

    They are kept where `data` was set: a generator in a class is read for each split of each
    instance, and would be empty from the second time on.
    """
    owner = next(one for one in (environment, *type(environment).__mro__) if "data" in vars(one))
    with _KEEPING:
        data: object = vars(owner)["data"]
        if isinstance(data, Iterator):
            owner.data = _ReadOnce(cast(Iterator[object], data))
        elif isinstance(data, Mapping):
            parts = cast(Mapping[object, object], data)
            once = {
                name: _ReadOnce(cast(Iterator[object], part))
                for name, part in parts.items()
                if isinstance(part, Iterator)
            }
            if once:
                owner.data = {**parts, **once}
    return environment.data


def source_of(given: object, *, where: str, folder: Path) -> ExampleSource:
    """Return `given` as a checked source; `where` names it in errors.

    `given` is a source, the path of a file in `folder`, or an iterable of examples or rows. An
    iterable is read to its end, and duplicate ids are refused at once.
    """
    if is_source(given):
        return CheckedSource(given, where=where)
    return _listed(_distinct(given, where=where, folder=folder))


def divided(given: object, split: Split, *, where: str, folder: Path) -> ExampleSource:
    """Return the part of `given` that belongs to `split`.

    A mapping gives each split its own examples. Anything else is divided by a hash of each
    example's id, and examples with equal prompts stay together. If one split would be empty, the
    examples nearest to it by hash go there.
    """
    if isinstance(given, Mapping):
        parts = cast(Mapping[object, object], given)
        unknown = [name for name in parts if name not in tuple(Split)]
        if unknown or split not in parts:
            raise EnvironmentLoadError(
                f"{where} has {', '.join(map(repr, parts)) or 'nothing'}; it must have "
                f"{' and '.join(repr(one.value) for one in Split)}"
            )
        part = parts[split.value if split.value in parts else split]
        return source_of(part, where=f"{where}[{split.value!r}]", folder=folder)
    if is_source(given):
        raise EnvironmentLoadError(
            f"{where} is a source, which is of one split; return it from examples(self, split)"
        )
    found = _distinct(given, where=where, folder=folder)
    if not found:
        raise EnvironmentLoadError(
            f"{where} has no rows; give it rows or prompts, at least one for each split"
        )
    keys = {one.split_key for _, one in found}
    if len(keys) < len(Split):
        num_rows = sum(1 + one.num_repeats for _, one in found)
        raise EnvironmentLoadError(
            f"{where} has {num_rows} rows with {len(keys)} different prompts, and needs one for "
            "each split: rows with equal prompts are never divided; give each split rows of its "
            "own, as a dict with 'train' and 'eval'"
        )
    ranked = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())
    held_out = {key for key in keys if split_of(key) is Split.EVAL}
    held_out = (held_out | {ranked[0]}) - {ranked[-1]}
    return _listed(
        [pair for pair in found if (pair[1].split_key in held_out) == (split is Split.EVAL)]
    )


def is_source(given: object) -> TypeGuard[ExampleSource]:
    """Return whether `given` gives examples by index, and is not just an iterable of them."""
    return hasattr(given, "example") and hasattr(given, "num_examples")


def _listed(found: Sequence[tuple[Example, Kept]]) -> ListSource:
    return ListSource(
        [example for example, _ in found], num_dropped=sum(one.num_repeats for _, one in found)
    )


def _distinct(given: object, *, where: str, folder: Path) -> list[tuple[Example, Kept]]:
    """Return the examples in `given`, checked, each with an id of its own.

    Rows without ids of their own are one example if they are equal in everything.
    """
    examples: list[Example] = []
    index_of_own: dict[str, int] = {}
    is_file = isinstance(given, str | Path)
    for index, row in enumerate(_items(given, where, folder)):
        about = f"{given}, row {index + 1}" if is_file else f"example {index} of {where}"
        example = checked_example(example_of(row, where=about), where=about)
        examples.append(example)
        if isinstance(row, Example) or (isinstance(row, Mapping) and "id" in row):
            other = index_of_own.setdefault(example.id, index)
            if other != index:
                raise _same_id(where, example.id, other, index)
    kept = distinct([mark_of(example) for example in examples])
    return [(replace(examples[one.index], id=one.id), one) for one in kept]


def _items(given: object, where: str, folder: Path) -> Iterator[object]:
    if isinstance(given, str | Path):
        yield from read_rows(folder / Path(given).expanduser())
        return
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        kind = type(cast(object, given)).__name__
        raise EnvironmentLoadError(
            f"{where} must be a list of examples, a generator, the path of a file, or a source "
            f"such as SplitSource, got {given!r:.80} ({kind})"
            f"{'; is a return missing?' if given is None else ''}"
        )
    items = iter(cast(Iterable[object], given))
    num_read = 0
    try:
        for item in islice(items, MAX_LISTED):
            yield item
            num_read += 1
    except TelescopeError:
        raise
    except Exception as error:
        raise _placed(f"example {num_read} of {where}", error) from error
    if num_read == MAX_LISTED:
        raise EnvironmentLoadError(
            f"{where} gave {MAX_LISTED} examples without an end; for examples that are made as "
            "they are needed, define draw(self, random), or return a GeneratedSource"
        )


def _same_id(where: str, example_id: str, first: int, second: int) -> DuplicateIdError:
    return DuplicateIdError(
        f"examples {first} and {second} of {where} have the same id {example_id!r}; results are "
        "kept, compared and resumed by id, so give each its own"
    )


def _placed(what: str, error: Exception) -> Exception:
    """Return `error` with the file that was read and the place in the author's code."""
    if isinstance(error, TelescopeError):
        return error
    advice = ""
    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
        advice = f"; {ADVICE}"
    text = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    return EnvironmentLoadError(f"{what} cannot be read: {text}{raised_at(error)}{advice}")
