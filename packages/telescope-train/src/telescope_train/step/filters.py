"""Filters for rollouts that are not trained on: cut, too slow, gibberish, repetition. Pure.

A filtered rollout keeps its reward and stays in the baseline of its group, which would otherwise
favor the remaining rollouts. Its tokens are in neither numerator nor denominator of the loss.
"""

import math
import zlib
from enum import StrEnum

import numpy as np

from telescope_core.base.types import Rollout, StopReason
from telescope_train.config.schema import AlgorithmSection

GIBBERISH_OFFSET = 2.0
"""Nats below the log-prob of a uniform draw from which on a token is nearly impossible."""
MIN_TEXT_LENGTH = 100
"""Characters; the compression ratio of a shorter text is meaningless."""
MAX_TEXT_LENGTH = 10_000
"""Characters at the end of a text that are checked: a loop, once begun, goes on to the end."""


class Filtered(StrEnum):
    """Reason why a rollout is not trained on."""

    OVERLONG = "overlong"
    """A turn was cut off by `max_tokens`, or the context had no room for another turn, so it is not
    known how it would have ended."""
    TIMEOUT = "timeout"
    """It was still being played at its deadline, perhaps because of a slow machine."""
    GIBBERISH = "gibberish"
    """A rare token was sampled that was less likely than in a uniform draw."""
    REPETITION = "repetition"
    """Its text repeats the same thing over and over."""


def filter_reason(
    rollout: Rollout, section: AlgorithmSection, *, vocab_size: int
) -> Filtered | None:
    """Return the first filter of `section` that matches `rollout`; None if it is trained on."""
    is_out_of_context = rollout.stop_reason is StopReason.CONTEXT_LENGTH
    if section.filter_overlong and (rollout.is_truncated or is_out_of_context):
        return Filtered.OVERLONG
    if section.filter_timeout and rollout.stop_reason is StopReason.TIMEOUT:
        return Filtered.TIMEOUT
    if section.filter_gibberish and has_gibberish(
        rollout,
        token_threshold=section.gibberish_token_threshold,
        vocab_size=vocab_size,
    ):
        return Filtered.GIBBERISH
    if section.filter_repetition:
        ratio = compression_ratio(written_text(rollout))
        if ratio > section.repetition_compression_threshold:
            return Filtered.REPETITION
    return None


def has_gibberish(rollout: Rollout, *, token_threshold: int, vocab_size: int) -> bool:
    """Return whether a sampled token is both rare and nearly impossible.

    Rare: its id is above `token_threshold` (tokenizers number tokens by how common they are).
    Nearly impossible: its log-prob is more than `GIBBERISH_OFFSET` nats below that of a uniform
    draw from the vocabulary.
    """
    least_logprob = -math.log(vocab_size) - GIBBERISH_OFFSET
    for turn in rollout.turns:
        is_rare = np.asarray(turn.completion.completion_ids) > token_threshold
        is_unlikely = np.asarray(turn.completion.logprobs) < least_logprob
        if (is_rare & is_unlikely).any():
            return True
    return False


def compression_ratio(text: str) -> float:
    """Return the factor by which zlib compresses the end of `text`; 1 for a short text.

    English prose gives 2 to 3, an endlessly repeated phrase several tens.
    """
    if len(text) < MIN_TEXT_LENGTH:
        return 1.0
    content = text[-MAX_TEXT_LENGTH:].encode()
    return len(content) / len(zlib.compress(content, 1))


def written_text(rollout: Rollout) -> str:
    """Return the text of the policy, all turns in order."""
    return "\n".join(turn.completion.message.content for turn in rollout.turns)
