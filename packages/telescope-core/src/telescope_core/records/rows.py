"""`RolloutRow`: the record of one rollout, the same for kept, discarded and failed ones."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import msgspec

from telescope_core.base.chains import SampledTokens
from telescope_core.base.decoders import convert
from telescope_core.base.messages import message_from_json, message_to_record
from telescope_core.base.secret_names import hidden, without_values
from telescope_core.base.types import (
    Completion,
    FinishReason,
    JsonValue,
    Message,
    Rollout,
    RolloutStatus,
    Span,
    StopReason,
    Turn,
    TurnInfo,
)
from telescope_core.records.files import plain
from telescope_core.records.tokens import tokens_from_json, tokens_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One row of `rollouts/step-*.parquet` and of an eval's `rollouts.jsonl`.

    Attempts that a later one replaced have the same row, in `attempts/` and `attempts.jsonl`.
    """

    step: int
    """Training step in which it was recorded; 0 in evals outside training."""
    environment: str
    example_id: str
    group_id: str
    index: int
    """Position in its group, 0 .. G-1."""
    attempt: int = 1
    """Number of the attempt that it records, 1 first."""
    status: RolloutStatus
    status_reason: str = ""
    error: str | None = None
    stop_reason: StopReason = StopReason.COMPLETED
    reward: float | None = None
    """None if the rollout failed."""
    advantage: float | None = None
    """None if no advantage was computed, as in evals."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    golden_answers: Mapping[str, str] = field(default_factory=dict[str, str])
    info: tuple[TurnInfo, ...] = ()
    messages: tuple[Message, ...] = ()
    conversations: tuple[tuple[Message, ...], ...] = ()
    """Conversations of a program at the rollout's endpoint; empty if there was none."""
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    """The tools that the policy was offered, in OpenAI's format; see `Rollout.tools`."""
    num_turns: int = 0
    """Number of model calls."""
    num_prompt_tokens: int | None = 0
    """Tokens of all prompts; each turn's prompt includes those of earlier turns. Those of requests
    without a usable answer count too. None if the endpoint left them out of a reply, or did not
    get to count them."""
    num_completion_tokens: int | None = 0
    """Tokens that the policy wrote, over all turns; None likewise."""
    is_truncated: bool = False
    is_refused: bool = False
    """Whether the endpoint declined to answer; its text is in `refusal` of the message."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """The reason for the end of each turn."""
    num_http_retries: int = 0
    """Times that requests to the model's endpoint were sent again after a failure."""
    oldest_version: int | None = None
    newest_version: int | None = None
    version_spans: tuple[tuple[Span, ...], ...] = ()
    """Versions of the weights that sampled the tokens of each turn, in order. A turn has none if
    only its oldest and newest version are known."""
    generate_s: float = 0.0
    """Seconds spent in model calls."""
    score_s: float = 0.0
    """Seconds spent in reward functions."""
    tokens: tuple[SampledTokens | None, ...] | None = None
    """Token ids and log-probs of each turn; None when they are not recorded."""

    @property
    def prompt_ids(self) -> "tuple[array[int], ...] | None":
        """Prompt token ids of each turn; None when they are not recorded."""
        return self._of_turns("prompt_ids")

    @property
    def completion_ids(self) -> "tuple[array[int], ...] | None":
        """Completion token ids of each turn; None likewise."""
        return self._of_turns("completion_ids")

    @property
    def logprobs(self) -> "tuple[array[float], ...] | None":
        """Log-probs in nats of each turn, one per completion id; None likewise."""
        return self._of_turns("logprobs")

    def _of_turns(self, name: str) -> tuple[Any, ...] | None:
        if self.tokens is None:
            return None
        nothing: array[Any] = array("f" if name == "logprobs" else "i")
        return tuple(nothing if one is None else getattr(one, name) for one in self.tokens)

    @property
    def is_filtered(self) -> bool:
        """Whether a content filter stopped any turn."""
        return "content_filter" in self.finish_reasons

    @property
    def completion_text(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


_PLAIN_FIELDS = tuple(
    name
    for name in RolloutRow.__dataclass_fields__
    if name not in ("tokens", "messages", "conversations")
)


def row_of(
    rollout: Rollout, *, step: int = 0, advantage: float | None = None, with_tokens: bool = False
) -> RolloutRow:
    """Return the row that records `rollout`; `with_tokens` adds token ids and log-probs."""
    completions = [turn.completion for turn in rollout.turns]
    lost = rollout.lost_tokens
    is_counted = all(c.is_counted for c in completions)
    num_prompt_tokens = num_completion_tokens = None
    if lost is not None and is_counted:
        num_prompt_tokens = sum(c.num_prompt_tokens for c in completions) + lost.prompt
        num_completion_tokens = rollout.num_completion_tokens + lost.completion
    return RolloutRow(
        step=step,
        environment=rollout.environment,
        example_id=rollout.example_id,
        group_id=rollout.group_id,
        index=rollout.index,
        attempt=rollout.attempt,
        status=rollout.status,
        status_reason=rollout.status_reason,
        error=rollout.error,
        stop_reason=rollout.stop_reason,
        reward=rollout.reward,
        advantage=advantage,
        rewards=rollout.rewards,
        metrics=rollout.metrics,
        tags=rollout.tags,
        golden_answers=rollout.golden_answers,
        info=rollout.info,
        messages=rollout.messages,
        conversations=rollout.conversations,
        tools=rollout.tools,
        num_turns=len(completions),
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_completion_tokens,
        is_truncated=rollout.is_truncated,
        is_refused=rollout.is_refused,
        finish_reasons=tuple(c.finish_reason for c in completions),
        num_http_retries=sum(c.num_retries for c in completions) + rollout.num_lost_retries,
        oldest_version=min((c.oldest_version for c in completions), default=None),
        newest_version=max((c.newest_version for c in completions), default=None),
        version_spans=tuple(c.spans for c in completions),
        generate_s=sum(turn.ended_s - turn.started_s for turn in rollout.turns),
        score_s=rollout.score_s,
        tokens=tuple(c.tokens for c in completions) if with_tokens else None,
    )


def rollout_of(row: RolloutRow) -> Rollout | None:
    """Return the rollout that `row` records, as it was before scoring and without tokens.

    None if its messages do not hold each of its turns. Times of single turns are not recorded, and
    are 0; nor are numbers of prompt tokens, and at endpoints of tokens: the last turn has all.
    """
    places = turns_in(row.messages, row.num_turns)
    if places is None:
        return None
    spans = row.version_spans if all(row.version_spans) else ()
    counts = [sum(one.num_tokens for one in turn) for turn in spans]
    if sum(counts) != row.num_completion_tokens or len(counts) != row.num_turns:
        counts = [0] * (row.num_turns - 1) + [row.num_completion_tokens or 0]
    prompts = [0] * (row.num_turns - 1) + [row.num_prompt_tokens or 0]
    completions = [
        Completion(
            message=row.messages[place],
            finish_reason=finish_reason,
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=num_tokens,
            is_counted=row.num_prompt_tokens is not None and row.num_completion_tokens is not None,
        )
        for place, finish_reason, num_prompt_tokens, num_tokens in zip(
            places, row.finish_reasons, prompts, counts, strict=False
        )
    ]
    turns = [Turn(completion=one, started_s=0.0, ended_s=0.0) for one in completions]
    return Rollout(
        environment=row.environment,
        example_id=row.example_id,
        group_id=row.group_id,
        index=row.index,
        attempt=row.attempt,
        messages=row.messages,
        turns=tuple(turns),
        conversations=row.conversations,
        tools=row.tools,
        stop_reason=row.stop_reason,
        metrics=row.metrics,
        tags=row.tags,
        info=row.info,
    )


def turns_in(messages: Sequence[Message], num_turns: int) -> list[int] | None:
    """Return the positions of the policy's messages; None if there are fewer than turns.

    The last ones are its: before them, a prompt may have answers as examples.
    """
    found = [number for number, one in enumerate(messages) if one.role == "assistant"]
    return found[len(found) - num_turns :] if num_turns <= len(found) else None


def row_to_json(row: RolloutRow) -> dict[str, JsonValue]:
    """Return `row` as a JSON object, with its tokens only if they are recorded."""
    fields = row_without_tokens(row)
    return fields if row.tokens is None else fields | tokens_to_json(row.tokens)


def row_without_tokens(row: RolloutRow) -> dict[str, Any]:
    """Return the JSON object of `row` without its tokens."""
    fields = {name: getattr(row, name) for name in _PLAIN_FIELDS}
    fields["messages"] = [message_to_record(message) for message in row.messages]
    fields["conversations"] = [
        [message_to_record(message) for message in conversation]
        for conversation in row.conversations
    ]
    fields["info"] = [asdict(one) for one in row.info]
    return fields


def row_from_json(fields: Mapping[str, Any]) -> RolloutRow:
    """Return the row in `fields`; unknown fields are ignored.

    Raises ValueError that names the place when a field is missing or has the wrong type.
    """
    known = {name: fields[name] for name in RolloutRow.__dataclass_fields__ if name in fields}
    try:
        messages = [message_from_json(message) for message in known.get("messages", ())]
        known["messages"] = msgspec.to_builtins(messages)
        known["conversations"] = [
            [msgspec.to_builtins(message_from_json(message)) for message in conversation]
            for conversation in known.get("conversations", ())
        ]
        known.pop("tokens", None)
        row = convert(known, RolloutRow)
        return replace(row, tokens=tokens_from_json(fields))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not the row of a rollout: {type(error).__name__}: {error}") from None


def without_secrets_in(row: RolloutRow, secrets: Collection[str]) -> RolloutRow:
    """Return `row` with the values of `secrets` removed from the texts of its environment.

    Its messages stay unchanged, because a model is trained on their tokens, which are recorded too.
    """
    if not secrets:
        return row
    return replace(
        row,
        status_reason=hidden(row.status_reason, secrets),
        error=None if row.error is None else hidden(row.error, secrets),
        tags=without_values(row.tags, secrets),
        info=tuple(replace(note, value=hidden(note.value, secrets)) for note in row.info),
    )


def without_pictures(row: RolloutRow) -> RolloutRow:
    """Return `row` with its texts alone: pictures of many rollouts would fill the memory."""
    messages, *conversations = (
        tuple(replace(one, images=()) if one.images else one for one in said)
        for said in (row.messages, *row.conversations)
    )
    return replace(row, messages=messages, conversations=tuple(conversations))


def readable_row(row: RolloutRow) -> RolloutRow:
    """Return `row` if its JSON can be read back, or else a failed rollout that gives the reason.

    An environment can put anything into a rollout. Values that no file can hold must not lose the
    rollouts around them, nor be found only when the file is read.
    """
    try:
        row_from_json(cast(dict[str, Any], plain(row_to_json(row))))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return RolloutRow(
            step=row.step,
            environment=row.environment,
            example_id=str(row.example_id),
            group_id=row.group_id,
            index=row.index,
            attempt=row.attempt,
            status=RolloutStatus.FAILED,
            status_reason="UnreadableRollout",
            error=f"the rollout cannot be recorded: {error}",
            stop_reason=StopReason.ERROR,
        )
    return row
