"""The tokens of a rollout in records: each chain once, and each turn as a place in a chain.

Records of earlier versions hold the whole prompt of every turn; they are read into chains. Pure.
"""

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from telescope_core.base.chains import ChainRecorder, SampledTokens, TokenChain, chains_of
from telescope_core.base.types import JsonValue

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
