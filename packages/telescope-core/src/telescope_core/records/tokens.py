"""The tokens of a rollout in records: each chain once, and each turn as a place in a chain.

Records of earlier versions hold the whole prompt of every turn; they are read into chains.
In columns of Parquet, `chains` has the chains of a rollout and `turns` the place of each turn in
them; tokens are copied as bytes, without an object per token, and their lists have 64-bit offsets.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from telescope_core.base.chains import ChainRecorder, SampledTokens, TokenChain, chains_of
from telescope_core.base.types import JsonValue
from telescope_core.records.arrow import arrow_modules

Tokens: TypeAlias = tuple[SampledTokens | None, ...]
"""The tokens of each turn; None for a turn whose endpoint returned none."""
_OFFSETS = ("prompt_end", "completion_end", "logprobs_start", "logprobs_end")
_offsets = attrgetter(*_OFFSETS)
PLACE_FIELDS = ("chain", *_OFFSETS)
"""Fields of a turn in a record: the number of its chain, and the offsets in it."""
PER_TURN = ("prompt_ids", "completion_ids", "logprobs")
"""Fields of older records, which held the whole prompt of every turn."""


class Numbered(NamedTuple):
    """The tokens of a rollout with numbers in place of references."""

    chains: list[TokenChain]
    """Chains, parents before their children."""
    parents: list[int | None]
    """Number of each chain's parent."""
    places: list[tuple[int, ...] | None]
    """`PLACE_FIELDS` of each turn; None for a turn without tokens."""


def numbered(tokens: Tokens) -> Numbered:
    """Return the chains of a rollout, and the place of each turn in them."""
    chains = chains_of(tokens)
    numbers = {id(chain): number for number, chain in enumerate(chains)}
    return Numbered(
        chains=chains,
        parents=[None if one.parent is None else numbers[id(one.parent)] for one in chains],
        places=[
            None if one is None else (numbers[id(one.chain)], *_offsets(one)) for one in tokens
        ],
    )


def at_places(chains: Sequence[TokenChain], places: Sequence[Mapping[str, int] | None]) -> Tokens:
    """Return the tokens of each turn from the fields of its place."""
    return tuple(
        None
        if place is None
        else SampledTokens(
            chain=chains[place["chain"]], **{offset: place[offset] for offset in _OFFSETS}
        )
        for place in places
    )


def linked(
    token_ids: Sequence["array[int]"],
    logprobs: Sequence["array[float]"],
    parents: Sequence[int | None],
    num_shared: Sequence[int],
) -> list[TokenChain]:
    """Return the chains, each linked to the parent that its number names."""
    chains: list[TokenChain] = []
    for ids, values, parent, num in zip(token_ids, logprobs, parents, num_shared, strict=True):
        found = None if parent is None else chains[parent]
        chains.append(TokenChain(ids, values, parent=found, num_shared=num))
    return chains


def tokens_to_json(tokens: Tokens) -> dict[str, JsonValue]:
    """Return the fields `chains` and `turns` of a record."""
    chains, parents, places = numbered(tokens)
    return {
        "chains": [
            {
                "parent": parent,
                "num_shared": chain.num_shared,
                "token_ids": chain.own_ids.tolist(),
                "logprobs": chain.logprobs.tolist(),
            }
            for chain, parent in zip(chains, parents, strict=True)
        ],
        "turns": [
            None if place is None else dict(zip(PLACE_FIELDS, place, strict=True))
            for place in places
        ],
    }


def tokens_from_json(fields: Mapping[str, Any]) -> Tokens | None:
    """Return the tokens in the fields of a record; None when they were not recorded."""
    if fields.get("completion_ids") is not None:
        return tokens_of_turns(*(fields[name] for name in PER_TURN))
    chains = fields.get("chains")
    if chains is None:
        return None
    linked_chains = linked(
        [array("i", one["token_ids"]) for one in chains],
        [array("f", one["logprobs"]) for one in chains],
        [one["parent"] for one in chains],
        [one["num_shared"] for one in chains],
    )
    return at_places(linked_chains, fields["turns"])


def tokens_of_turns(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> Tokens:
    """Return the tokens of turns that were each recorded with their whole prompt."""
    recorder = ChainRecorder()
    turns = zip(prompt_ids, completion_ids, logprobs, strict=True)
    return tuple(recorder.record(*turn) if turn[0] or turn[1] else None for turn in turns)


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
    every = [chain for row in recorded for chain in row.chains]
    columns = [
        arrow.array([parent for row in recorded for parent in row.parents], arrow.int32()),
        arrow.array([one.num_shared for one in every], arrow.int64()),
        list_array([one.own_ids for one in every], arrow.int32()),
        list_array([one.logprobs for one in every], arrow.float32()),
    ]
    chains = arrow.ListArray.from_arrays(
        arrow.array([0, *accumulate(sizes)], arrow.int32()),
        arrow.StructArray.from_arrays(columns, fields=list(_chain_type())),
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


def list_array(lists: Sequence["array[Any]"], kind: Any) -> Any:
    """Return a column of lists of the 4-byte type `kind`."""
    arrow, _ = arrow_modules()
    offsets = [0, *accumulate(map(len, lists))]
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
