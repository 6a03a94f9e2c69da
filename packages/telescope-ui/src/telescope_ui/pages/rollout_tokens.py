"""The tokens of a rollout as columns: ids, text, log-probs, and the weights that sampled them.

For trained tokens, also the numbers that the trainer computed for them.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from telescope_core.base.chains import TokenChain, chains_of
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import RolloutStatus, Span
from telescope_core.records.rows import RolloutRow
from telescope_core.records.token_facts import TOKEN_FACTS_FOLDER, TurnFacts, facts_of_rollout
from telescope_core.records.tokens import numbered
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.run_files import step_part
from telescope_ui.files.token_texts import texts_for

MAX_TOKENS = 200_000
"""Most tokens of all chains together."""
_LARGEST_LOG_RATIO = 80.0
"""Nats; larger values are shown as this."""


class Training(NamedTuple):
    """Facts of the trainer about the tokens of a rollout."""

    turns: Sequence[TurnFacts] | None
    """Facts about each trained turn; None = not known."""
    problems: Sequence[str] = ()
    """Reasons why something could not be read."""


UNKNOWN = Training(None)


def training_of(run: Path, row: RolloutRow) -> Training:
    """Return the trainer's facts about a rollout of training."""
    try:
        part = step_part(run, TOKEN_FACTS_FOLDER, row.step)
        if part is None:
            # Of a kept one it is not known, if the run did not record it. Others never are.
            return UNKNOWN if row.status is RolloutStatus.KEPT else Training([])
        return Training(facts_of_rollout(part, (row.group_id, row.index, row.attempt)))
    except ConfigError as error:
        return Training(None, [f"{TOKEN_FACTS_FOLDER} of step {row.step} are left out: {error}"])


def tokens_of(
    run: Path, row: RolloutRow, training: Training = UNKNOWN, *, with_chains: bool = True
) -> JsonObject | None:
    """Return the tokens of `row`, chain by chain; None if they are not recorded.

    Without `with_chains`, only where each turn is.
    """
    if row.tokens is None:
        return None
    found = numbered(row.tokens)
    texts = texts_for(run) if with_chains else None
    facts = {one.turn: one for one in training.turns or ()}
    chains: list[JsonObject] = []
    left = MAX_TOKENS
    for number, chain in enumerate(found.chains if with_chains else ()):
        if len(chain) > left and chains:
            break
        length = min(len(chain), left)
        left -= length
        places = [
            _Place(turn, place)
            for turn, place in enumerate(found.places)
            if place is not None and place[0] == number
        ]
        ids = list(chain.token_ids(0, length))
        chains.append(
            {
                "ids": ids,
                **_sampled(chain, places, length),
                "parent": found.parents[number],
                "num_shared": min(chain.num_shared, length),
                "texts": None if texts is None else texts.pieces(ids),
                "versions": _versions(row, places, length),
                "advantage": row.advantage,
                "mask": None if training.turns is None else _mask(places, facts, length),
                "columns": _columns(chain, places, facts, length),
            }
        )
    return {
        "num_chains": len(found.chains),
        "chains": chains,
        "turns": [
            None
            if place is None
            else {"chain": place[0], "prompt_end": place[1], "completion_end": place[2]}
            for place in found.places
        ],
        "is_cut": sum(map(len, chains_of(row.tokens))) > MAX_TOKENS,
    }


class _Place:
    """Position of a turn's completion in its chain."""

    def __init__(self, turn: int, place: Sequence[int]) -> None:
        self.turn = turn
        _, self.start, self.end, self.first_logprob, self.last_logprob = place


def _sampled(chain: TokenChain, places: Sequence[_Place], length: int) -> JsonObject:
    """Return which tokens of a chain the model wrote, in which turn, and their log-probs."""
    logprobs = [(one, chain.logprobs[one.first_logprob : one.last_logprob]) for one in places]
    turns = _laid([(one, [one.turn] * (one.end - one.start)) for one in places], length)
    return {
        "is_sampled": [turn is not None for turn in turns],
        "logprobs": _laid(logprobs, length),
        "turns": turns,
    }


def _versions(row: RolloutRow, places: Sequence[_Place], length: int) -> list[Any] | None:
    """Return the weights that sampled each token; None if none is recorded."""
    whole = row.oldest_version if row.oldest_version == row.newest_version else None
    values: list[tuple[_Place, list[int]]] = []
    for one in places:
        spans: Sequence[Span] = ()
        if one.turn < len(row.version_spans):
            spans = row.version_spans[one.turn]
        if not spans and whole is not None:
            spans = (Span(whole, one.end - one.start),)
        values.append((one, [span.version for span in spans for _ in range(span.num_tokens)]))
    return _laid(values, length) if any(known for _, known in values) else None


def _mask(
    places: Sequence[_Place], facts: Mapping[int, TurnFacts], length: int
) -> list[int | None]:
    """Return for each token of the model whether it was in the loss of the step: 1 or 0."""
    return _laid(
        [(one, [int(one.turn in facts)] * (one.end - one.start)) for one in places], length
    )


def _columns(
    chain: TokenChain, places: Sequence[_Place], facts: Mapping[int, TurnFacts], length: int
) -> dict[str, list[float | None]]:
    """Return further values per token by name, without those that no turn of the chain has."""
    known = [(one, facts[one.turn]) for one in places if one.turn in facts]
    if not known:
        return {}
    columns = {
        "trainer log-prob": [(one, found.logprobs) for one, found in known],
        "entropy": [(one, found.entropy) for one, found in known],
        "ratio": [
            (one, _ratios(found.logprobs, chain.logprobs[one.first_logprob : one.last_logprob]))
            for one, found in known
        ],
        "effect": [(one, found.effective_advantages) for one, found in known],
        "weight": [(one, [found.weight] * len(found.logprobs)) for one, found in known],
    }
    return {name: _laid(values, length) for name, values in columns.items()}


def _ratios(trainer: "array[float]", sampler: "array[float]") -> list[float]:
    """Return the log ratio of each token's probability, trainer over sampler."""
    return [
        math.exp(max(-_LARGEST_LOG_RATIO, min(_LARGEST_LOG_RATIO, new - old)))
        for new, old in zip(trainer, sampler, strict=False)
    ]


def _laid(values: Iterable[tuple[_Place, Iterable[Any]]], length: int) -> list[Any]:
    """Return a value for each of `length` tokens: those of the turns in place, others None."""
    found: list[Any] = [None] * length
    for place, own in values:
        for at, value in zip(range(place.start, min(place.end, length)), own, strict=False):
            found[at] = value
    return found
