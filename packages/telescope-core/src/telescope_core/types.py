"""The nouns of Telescope: frozen data that flows from an environment to the gradient.

Nothing here computes or does I/O. Standing letters: N rollouts, G group size, T packed tokens.
Log-probs are in nats, times in seconds on the monotonic clock of the process that took them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
    )
else:
    # The wire library reads annotations at run time and knows no recursive aliases.
    JsonValue = Any
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
WeightVersion: TypeAlias = int
"""0 = the initial weights, +1 per publish."""


class Split(StrEnum):
    """Which examples of an environment are meant."""

    TRAIN = "train"
    """Drawn for training."""
    EVAL = "eval"
    """Held out; disjoint from train by example id."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    COMPLETED = "completed"
    """The environment has no further turn."""
    LENGTH = "length"
    """The policy reached `max_tokens` in its last turn."""
    MAX_TURNS = "max_turns"
    """The environment's turn limit was reached."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed."""
    ERROR = "error"
    """Something raised; `Rollout.error` says what."""
    CANCELLED = "cancelled"
    """Somebody asked for it to stop."""


class RolloutStatus(StrEnum):
    """What became of a rollout."""

    KEPT = "kept"
    """It counts: in an eval's mean, or in a training batch."""
    DISCARDED = "discarded"
    """It is complete but left out of the batch; `status_reason` says why."""
    CANCELLED = "cancelled"
    """It was stopped before its end."""
    FAILED = "failed"
    """Infrastructure or environment code failed; it has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call written by the policy."""

    id: str
    name: str
    arguments: str
    """JSON text as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation in OpenAI terms."""

    role: Role
    content: str
    reasoning: str = ""
    """Thinking text of an assistant message, without its marks, as the chat template sees it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of an environment's split."""

    id: str
    """Stable over processes, machines and releases of one major version."""
    prompt: str | tuple[Message, ...]
    answer: str = ""
    info: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a policy is sampled."""

    max_tokens: int
    """Per turn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """An OpenAI-compatible chat endpoint, for programs that bring a client of their own."""

    base_url: str
    """Up to and including `/v1`."""
    api_key: str = field(repr=False)
    """Never empty: clients insist on one even where the endpoint does not."""
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a policy answered to a request. Token fields are empty where an endpoint hides them."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_ids: Sequence[int] = ()
    """Sampled ones are `array("i")`, 4 bytes a token; a tuple is as good."""
    completion_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """`array("f")` likewise. One per completion id, of the distribution that was sampled from."""
    oldest_version: WeightVersion = 0
    newest_version: WeightVersion = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call of a rollout, ids and log-probs exactly as sampled."""

    completion: Completion
    started_s: float
    ended_s: float
    temperature: float | None = None
    """What it was sampled at; None = as the rollout as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInfo:
    """Something worth keeping about one turn, such as the output of a program that was run."""

    turn: int
    """Number of the turn it belongs to, 0 first."""
    key: str
    value: str
    kind: Literal["text", "code", "stdout", "stderr"] = "text"
    """How to show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRange:
    """What a metric says of itself, for those who show it."""

    low: float | None = None
    """Smallest possible value; None = no limit is known."""
    high: float | None = None
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at one example."""

    environment: str
    example_id: str
    group_id: str
    index: int
    """Position in its group, 0 .. G-1."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, prompt first."""
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason = StopReason.COMPLETED
    status: RolloutStatus = RolloutStatus.KEPT
    status_reason: str = ""
    error: str | None = None
    """`Type: message` of what failed; None unless the status is failed."""
    reward: float | None = None
    """None until scored, and for ever when failed: a failure is not a reward of 0."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Unweighted value of each reward function."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    golden_answers: Mapping[str, str] = field(default_factory=dict[str, str])
    """What a right answer would have been, by name."""
    info: tuple[TurnInfo, ...] = ()
    """Kept by the environment, turn by turn."""
    score_s: float = 0.0
    """Time spent in reward functions."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the policy wrote, over all turns."""
        return sum(turn.completion.num_completion_tokens for turn in self.turns)

    @property
    def completion_text(self) -> str:
        """Text of the last assistant message; empty when there is none."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""

    @property
    def is_lost(self) -> bool:
        """Whether its process is gone with it: no verdict on anything, and worth another try."""
        return (
            self.status is RolloutStatus.FAILED and self.status_reason == "EnvironmentProcessError"
        )

    @property
    def is_truncated(self) -> bool:
        """Whether any turn was cut by `max_tokens`."""
        return any(turn.completion.finish_reason == "length" for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one example: the unit of credit."""

    id: str
    environment: str
    example_id: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDescription:
    """What an environment says of itself before anything is played."""

    name: str
    version: str
    reward_min: float
    reward_max: float
    success_threshold: float
    num_examples: Mapping[Split, int | None]
    """Size of each split it has; None = endless."""
    network: Literal["none", "load", "always"]
    """When it needs the network: never, to load its data, or while playing."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables it may read."""
    dataset_revisions: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, MetricRange] = field(default_factory=dict[str, MetricRange])
    """What is known of the metrics it declares."""
