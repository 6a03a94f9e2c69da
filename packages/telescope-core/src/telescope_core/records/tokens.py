"""The tokens of a rollout in records: its chains, each once, and each turn as a place in one.

Records of earlier versions hold the whole prompt of every turn; they are read into chains. Pure.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from telescope_core.chains import ChainRecorder, SampledTokens, TokenChain, chains_of
from telescope_core.types import JsonValue

Tokens: TypeAlias = tuple[SampledTokens | None, ...]
"""The tokens of each turn; None for a turn whose endpoint gave none."""
_OFFSETS = ("prompt_end", "completion_end", "logprobs_start", "logprobs_end")
PLACE_FIELDS = ("chain", *_OFFSETS)
"""What a record says of a turn: the number of its chain, and the offsets in it."""
PER_TURN = ("prompt_ids", "completion_ids", "logprobs")
"""The fields of records that held the whole prompt of every turn."""


class NumberedChain(NamedTuple):
    """A chain that names its parent by its number."""

    parent: int | None
    chain: TokenChain


def numbered_chains(tokens: Tokens) -> list[NumberedChain]:
    """Return the chains of a rollout, parents before their children."""
    chains = chains_of(tokens)
    numbers = {id(chain): number for number, chain in enumerate(chains)}
    return [
        NumberedChain(None if chain.parent is None else numbers[id(chain.parent)], chain)
        for chain in chains
    ]


def places_of(tokens: Tokens) -> list[dict[str, int] | None]:
    """Return where each turn is in `numbered_chains(tokens)`; None for a turn without tokens."""
    numbers = {id(one.chain): number for number, one in enumerate(numbered_chains(tokens))}
    return [None if place is None else _place(place, numbers[id(place.chain)]) for place in tokens]


def at_places(chains: Sequence[TokenChain], places: Sequence[Mapping[str, int] | None]) -> Tokens:
    """Return the tokens of each turn: the opposite of `places_of`."""
    return tuple(
        None
        if place is None
        else SampledTokens(chain=chains[place["chain"]], **{name: place[name] for name in _OFFSETS})
        for place in places
    )


def linked(
    token_ids: Sequence["array[int]"],
    logprobs: Sequence["array[float]"],
    parents: Sequence[int | None],
    num_shared: Sequence[int],
) -> list[TokenChain]:
    """Return chains, each with the parent that its number names, which stands before it."""
    chains: list[TokenChain] = []
    for ids, values, parent, num in zip(token_ids, logprobs, parents, num_shared, strict=True):
        found = None if parent is None else chains[parent]
        chains.append(TokenChain(ids, values, parent=found, num_shared=num))
    return chains


def tokens_to_json(tokens: Tokens) -> dict[str, JsonValue]:
    """Return the fields `chains` and `turns` of a record."""
    return {
        "chains": [
            {
                "parent": parent,
                "num_shared": chain.num_shared,
                "token_ids": chain.own_ids.tolist(),
                "logprobs": chain.logprobs.tolist(),
            }
            for parent, chain in numbered_chains(tokens)
        ],
        "turns": places_of(tokens),
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
    """Return the tokens of turns that were each recorded with the whole prompt."""
    recorder = ChainRecorder()
    turns = zip(prompt_ids, completion_ids, logprobs, strict=True)
    return tuple(recorder.record(*turn) if turn[0] or turn[1] else None for turn in turns)


def _place(place: SampledTokens, number: int) -> dict[str, int]:
    return {"chain": number, **{name: getattr(place, name) for name in _OFFSETS}}
