"""The tokens of rollouts as columns of Parquet, copied as bytes without an object per token.

`chains` has the chains of a rollout, and `turns` the place of each turn in them. Lists of tokens
have offsets of 64 bits.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from telescope_core.base.chains import TokenChain
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.tokens import PLACE_FIELDS, Tokens, at_places, linked, numbered

COLUMNS = ("chains", "turns")


def token_fields() -> list[tuple[str, Any]]:
    """Return name and Arrow type of each column."""
    arrow, _ = arrow_modules()
    place = arrow.struct([(name, arrow.int64()) for name in PLACE_FIELDS])
    return [("chains", arrow.list_(_chain_type())), ("turns", arrow.list_(place))]


def token_columns(tokens: Sequence[Tokens | None]) -> dict[str, Any]:
    """Return the columns of rows by name; null for a row without tokens."""
    arrow, _ = arrow_modules()
    types = dict(token_fields())
    rows = [None if one is None else numbered(one) for one in tokens]
    recorded = [row for row in rows if row is not None]
    sizes = [0 if row is None else len(row.chains) for row in rows]
    chains = arrow.ListArray.from_arrays(
        arrow.array(_offsets(sizes), arrow.int32()),
        _chain_array(
            [chain for row in recorded for chain in row.chains],
            [parent for row in recorded for parent in row.parents],
        ),
        mask=arrow.array([row is None for row in rows], arrow.bool_()),
    )
    places = [None if row is None else row.places for row in rows]
    return {"chains": chains, "turns": arrow.array(places, types["turns"])}


def read_tokens(chains: Any, turns: Any) -> Iterator[Tokens | None]:
    """Yield the tokens of each row from the two columns."""
    parents_column, num_shared_column, ids_column, logprobs_column = chains.flatten().flatten()
    token_ids, logprobs = arrays_in("i", ids_column), arrays_in("f", logprobs_column)
    parents, num_shared = parents_column.to_pylist(), num_shared_column.to_pylist()
    first = 0
    for size, places in zip(chains.value_lengths().to_pylist(), turns.to_pylist(), strict=True):
        if size is None:
            yield None
            continue
        part = slice(first, first + size)
        first += size
        found = linked(token_ids[part], logprobs[part], parents[part], num_shared[part])
        yield at_places(found, places)


def _chain_type() -> Any:
    arrow, _ = arrow_modules()
    return arrow.struct(
        [
            ("parent", arrow.int32()),
            ("num_shared", arrow.int64()),
            ("token_ids", arrow.large_list(arrow.int32())),
            ("logprobs", arrow.large_list(arrow.float32())),
        ]
    )


def _chain_array(chains: Sequence[TokenChain], parents: Sequence[int | None]) -> Any:
    arrow, _ = arrow_modules()
    kind = _chain_type()
    columns = [
        arrow.array(parents, arrow.int32()),
        arrow.array([one.num_shared for one in chains], arrow.int64()),
        list_array([one.own_ids for one in chains], arrow.int32()),
        list_array([one.logprobs for one in chains], arrow.float32()),
    ]
    return arrow.StructArray.from_arrays(columns, fields=list(kind))


def list_array(lists: Sequence["array[Any]"], kind: Any) -> Any:
    """Return a column of lists of the 4-byte type `kind`."""
    arrow, _ = arrow_modules()
    offsets = _offsets(map(len, lists))
    content = arrow.py_buffer(b"".join(lists))
    values = arrow.Array.from_buffers(kind, offsets[-1], [None, content])
    return arrow.LargeListArray.from_arrays(arrow.array(offsets, arrow.int64()), values)


def arrays_in(code: str, lists: Any) -> "list[array[Any]]":
    """Return the elements of a list column as arrays of type `code`, which has 4 bytes."""
    # `flatten` gives what the lists hold from the first element on, whatever they are a part of.
    values = lists.flatten()
    content = memoryview(values.buffers()[1] or b"")
    found: list[array[Any]] = []
    sizes: list[int] = lists.value_lengths().to_pylist()
    for start, end in pairwise(accumulate(sizes, initial=int(values.offset))):
        one: array[Any] = array(code)
        one.frombytes(content[4 * start : 4 * end])
        found.append(one)
    return found


def _offsets(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)]
