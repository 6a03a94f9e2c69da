"""The tokens of a rollout as columns: ids, text, log-probs, and which of them the model wrote."""

from pathlib import Path
from typing import Any

from telescope_core.chains import TokenChain, chains_of
from telescope_core.records.rows import RolloutRow
from telescope_core.records.tokens import numbered
from telescope_ui.answers import JsonObject
from telescope_ui.token_texts import texts_for

MAX_TOKENS = 200_000
"""Tokens of all chains together that are given."""


def tokens_of(run: Path, row: RolloutRow) -> JsonObject | None:
    """Return the tokens of `row`, chain by chain; None if they are not recorded."""
    if row.tokens is None:
        return None
    found = numbered(row.tokens)
    texts = texts_for(run)
    chains: list[JsonObject] = []
    left = MAX_TOKENS
    for number, chain in enumerate(found.chains):
        if len(chain) > left and chains:
            break
        length = min(len(chain), left)
        left -= length
        turns = [
            (turn, place)
            for turn, place in enumerate(found.places)
            if place is not None and place[0] == number
        ]
        one = _chain(chain, turns, length)
        one |= {
            "parent": found.parents[number],
            "num_shared": min(chain.num_shared, length),
            "texts": None if texts is None else texts.pieces(one["ids"]),
            "versions": None,
            "advantage": row.advantage,
            "columns": {},
        }
        chains.append(one)
    return {
        "num_chains": len(found.chains),
        "chains": chains,
        "turns": [_turn(place) for place in found.places],
        "is_cut": sum(map(len, chains_of(row.tokens))) > MAX_TOKENS,
    }


def _chain(chain: TokenChain, turns: list[tuple[int, Any]], length: int) -> JsonObject:
    """Return the columns of the first `length` tokens of a chain.

    A turn is a number and its place: chain, prompt_end, completion_end, and where its log-probs
    begin and end.
    """
    logprobs: list[float | None] = [None] * length
    by_turn: list[int | None] = [None] * length
    for turn, (_, start, end, first, last) in turns:
        values = chain.logprobs[first:last]
        for offset in range(max(0, min(end, length) - start)):
            by_turn[start + offset] = turn
            if offset < len(values):
                logprobs[start + offset] = values[offset]
    return {
        "ids": list(chain.token_ids(0, length)),
        "is_sampled": [turn is not None for turn in by_turn],
        "logprobs": logprobs,
        "turns": by_turn,
    }


def _turn(place: Any) -> JsonObject | None:
    if place is None:
        return None
    return {"chain": place[0], "prompt_end": place[1], "completion_end": place[2]}
