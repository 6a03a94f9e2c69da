"""Read the replies of a worker: bytes from an environment's code, which may be anything.

A reply that cannot be read, or that says what no environment can mean, raises UnreadableReplyError.
Texts are cut and escaped, because terminals, pages and logs show them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import msgspec

from telescope_core.base.errors import NOTHING_SPENT
from telescope_core.base.terminal import escaped, foreign
from telescope_core.base.types import (
    LOST_TO,
    EnvironmentDescription,
    Example,
    Group,
    Rollout,
    RolloutStatus,
    Turn,
)
from telescope_core.processes.frames import ProtocolError, without_tokens

T = TypeVar("T")
Reader: TypeAlias = Callable[[msgspec.Raw], T]
MOST_ERROR_CHARACTERS = 8000
"""Longest error text, which includes the last lines of a worker's output."""
_MOST_NAME_CHARACTERS = 200
_MOST_COUNT = 2**31
"""More than any number of tokens, turns or examples; records hold them in 32 bits."""


class UnreadableReplyError(ProtocolError):
    """A reply of a worker cannot be read, or holds impossible values."""


def _reader(kind: Any, then: Callable[[Any], Any] = lambda value: value) -> "Reader[Any]":
    decoder = msgspec.msgpack.Decoder(kind)

    def read(value: msgspec.Raw) -> Any:
        try:
            found = decoder.decode(value)
        # The last three: bytes that are no text, what is nested too deep, and too large numbers.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise UnreadableReplyError(
                f"{type(error).__name__}: {foreign(str(error), 300)}"
            ) from None
        return then(found)

    return read


def _sound_description(found: EnvironmentDescription) -> EnvironmentDescription:
    """Return `found` if an environment can declare it; its texts are made safe to show."""
    ranges = [found.reward_min, found.reward_max, found.success_threshold]
    ranges += [end for one in found.metrics.values() for end in (one.low, one.high) if end]
    ranges += found.reward_weights.values()
    _require(_are_finite(ranges), "a range that is no range of numbers")
    _require(found.reward_min <= found.reward_max, "a reward_min above reward_max")
    sizes = [size for size in found.num_examples.values() if size is not None]
    sizes += found.num_dropped.values()
    _require(all(size >= 0 for size in sizes), "a negative number of examples")
    return replace(
        found,
        name=foreign(found.name, _MOST_NAME_CHARACTERS),
        version=foreign(found.version, _MOST_NAME_CHARACTERS),
        metrics={foreign(k, _MOST_NAME_CHARACTERS): v for k, v in found.metrics.items()},
        reward_weights={
            foreign(k, _MOST_NAME_CHARACTERS): v for k, v in found.reward_weights.items()
        },
        dataset_revisions={
            foreign(name, _MOST_NAME_CHARACTERS): foreign(revision, _MOST_NAME_CHARACTERS)
            for name, revision in found.dataset_revisions.items()
        },
    )


def read_group_of(group: Group) -> "Reader[Group]":
    """Return a reader of replies that hold `group` with its group rewards.

    Other fields keep the values of this process, whatever the worker sends.
    """

    def read(value: msgspec.Raw) -> Group:
        scored = [_sound(one) for one in _group(value).rollouts]
        asked = [one.index for one in group.rollouts]
        _require(
            [one.index for one in scored] == asked, "other rollouts than it was asked to score"
        )
        for one, own in zip(scored, group.rollouts, strict=True):
            _require((one.reward is None) == (own.reward is None), "rewards for other rollouts")
        rollouts = (
            replace(own, reward=one.reward, rewards=one.rewards, metrics=one.metrics, info=one.info)
            for one, own in zip(scored, group.rollouts, strict=True)
        )
        return replace(group, rollouts=tuple(rollouts))

    return read


def _require(is_sound: bool, otherwise: str) -> None:
    if not is_sound:
        raise UnreadableReplyError(f"it has {otherwise}")


def _are_finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(number) for number in numbers)


def _sound(rollout: Rollout) -> Rollout:
    """Return `rollout` if its values are possible; its texts are made safe to show."""
    is_failed = rollout.status is RolloutStatus.FAILED
    is_known = is_failed or rollout.status is RolloutStatus.KEPT
    _require(is_known, f"the status {rollout.status.value!r}, which only the host gives")
    _require((rollout.reward is None) == is_failed, "a reward where it failed, or none where not")
    numbers = [*rollout.rewards.values(), *rollout.metrics.values(), rollout.score_s]
    _require(_are_finite([*numbers, rollout.reward or 0.0]), "a number that is not finite")
    _require(rollout.score_s >= 0, "a negative time")
    _require(all(0 <= note.turn < _MOST_COUNT for note in rollout.info), "a note of no turn")
    _require(all(map(_is_possible, rollout.turns)), "a turn with impossible numbers")
    return replace(
        without_tokens(rollout),
        lost_tokens=NOTHING_SPENT,  # only the host, which asks the model, knows them
        status_reason=foreign(rollout.status_reason, _MOST_NAME_CHARACTERS),
        error=None if rollout.error is None else foreign(rollout.error, MOST_ERROR_CHARACTERS),
        rewards=_named(rollout.rewards),
        metrics=_named(rollout.metrics),
        # Only the host knows whose code has ended a worker.
        tags={escaped(k): escaped(v) for k, v in rollout.tags.items() if k != LOST_TO},
    )


def _is_possible(turn: Turn) -> bool:
    done = turn.completion
    counts = [done.num_prompt_tokens, done.num_completion_tokens, done.num_retries]
    counts += [done.oldest_version, done.newest_version]
    times = [turn.started_s, turn.ended_s, turn.temperature or 0.0]
    return all(0 <= count < _MOST_COUNT for count in counts) and _are_finite(times)


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {foreign(name, _MOST_NAME_CHARACTERS): value for name, value in values.items()}


read_nothing: "Reader[None]" = _reader(None)
read_example: "Reader[Example]" = _reader(Example)
read_description: "Reader[EnvironmentDescription]" = _reader(
    EnvironmentDescription, _sound_description
)
read_rollout: "Reader[Rollout]" = _reader(Rollout, _sound)
"""Of a rollout that was played or failed, without token ids and log-probs."""
read_gold: "Reader[Rollout | None]" = _reader(Rollout | None, lambda one: one and _sound(one))
"""Of the rollout of a gold answer; None when there is none."""
_group: "Reader[Group]" = _reader(Group)
