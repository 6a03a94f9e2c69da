"""The types of Telescope: frozen data that flows from an environment to the gradient.

Nothing here computes or does I/O; the module `chains` holds the tokens of turns. Standing letters:
N rollouts, G group size, T packed tokens. Log-probs are in nats, times in seconds on the monotonic
clock of the process that took them.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from telescope_core.base.chains import SampledTokens
from telescope_core.base.errors import NOTHING_SPENT, SpentTokens

if TYPE_CHECKING:
    JsonValue: TypeAlias = (
        "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
    )
else:
    # The wire library reads annotations at run time and knows no recursive aliases.
    JsonValue = Any
Tools: TypeAlias = Sequence[dict[str, JsonValue]]
"""Tools that a request offers, in OpenAI form."""
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]
"""Why a turn ended: the model ended it, `max_tokens` cut it (also in the middle of a tool call), it
calls tools, or the endpoint's content filter stopped it."""
CLUSTER = "cluster"
"""Tag of a rollout with the cluster of its example, if that has one."""
ANSWER = "answer"
"""Tag of a rollout with the answer that its grader read, one text for all that are equal: its vote
in maj@k. A rollout without the tag has no vote."""
LOST_TO = "lost_to"
"""Tag of a lost rollout: id of the rollout whose code ended, or blocked, the process of both."""
UNGRADABLE = "ungradable"
"""Metric of a rollout: 1 when it gave an answer that the grader could not read, else 0."""
WeightVersion: TypeAlias = int
"""0 = the initial weights, +1 per publish."""


class Split(StrEnum):
    """One part of an environment's examples: for training, or for evals."""

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
    CONTEXT_LENGTH = "context_length"
    """The conversation left no room in the model's context for another turn."""
    MAX_TURNS = "max_turns"
    """The turn limit of the environment, or of an agent program that tells it, was reached."""
    TIMEOUT = "timeout"
    """The rollout's deadline passed, or a time limit of its program, such as `agent_timeout_s`."""
    ERROR = "error"
    """An error was raised; it is in `Rollout.error`."""
    CANCELLED = "cancelled"
    """The run or the user stopped it."""


class RolloutStatus(StrEnum):
    """The outcome of a rollout."""

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
    """Identifies the call in its conversation; the result of the call names it."""
    name: str
    """Name of the tool."""
    arguments: str
    """JSON text as the policy wrote it, which may not be valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture in a message. `telescope_core.images` reads one from a file or from bytes."""

    media_type: str
    """Such as image/png."""
    data: str
    """The file's bytes in base64."""
    at: int = 0
    """Number of characters of the message's content that come before it."""
    detail: str = ""
    """How closely an endpoint looks at it, such as low or high; empty leaves that to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation in OpenAI terms."""

    role: Role
    content: str
    reasoning: str = ""
    """Thinking text of an assistant message, without the tags around it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls in an assistant message, in the order in which they were written."""
    tool_call_id: str | None = None
    """In a tool message: the call whose result it is."""
    refusal: str = ""
    """Text with which an endpoint declined to answer, which it sends in place of the content."""
    images: tuple[Image, ...] = ()
    """Pictures in a message to the model, in the order in which they stand in its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of an environment's split."""

    id: str
    """Stable over processes, machines and releases of one major version."""
    prompt: str | tuple[Message, ...]
    """The prompt for the policy: the text of a user message, or the first messages."""
    answer: str = ""
    """The right answer, for reward functions; the policy never sees it."""
    info: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Further data for reward functions."""
    cluster: str = ""
    """Name shared by examples that depend on each other, such as the questions about one text;
    intervals of evals are then computed over clusters. Empty = it depends on no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of a policy."""

    max_tokens: int
    """Most tokens of one turn."""
    temperature: float | None = 1.0
    """Divides the logits; 0 = always the likeliest token. None = not set: an endpoint then uses its
    own. In training it is always set."""
    top_p: float | None = 1.0
    """Smallest set of likeliest tokens whose probabilities sum to this is sampled from; 1 = all.
    None, as in the next three = not set, but for what `extra` has; only in settings of evals."""
    top_k: int | None = -1
    """Number of likeliest tokens that are sampled from; -1 = all."""
    min_p: float | None = 0.0
    """Tokens less likely than this share of the likeliest one are not sampled; 0 = none."""
    repetition_penalty: float | None = 1.0
    """Divides the logits of tokens that occurred before; 1 = no penalty."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""
    include_stop_str_in_output: bool = False
    """Whether the answer has the stop text that ended it, as it was sampled; chat endpoints leave
    it out unless they are asked, which few can be."""
    seed: int | None = None
    """Makes the server draw the same tokens again, where it supports that."""
    extra: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Further fields of requests to a chat endpoint, in its own names, such as reasoning_effort."""

    @property
    def temperature_text(self) -> str:
        """The temperature for people."""
        return "left to the endpoint" if self.temperature is None else f"{self.temperature:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """An OpenAI-compatible chat endpoint, for programs that use a client of their own."""

    base_url: str
    """URL up to and including `/v1`; of OpenAI's APIs, chat completions alone are sure to be
    there."""
    api_key: str = field(repr=False)
    """Never empty, because clients require one even where the endpoint does not."""
    model: str
    """Name of the model in requests."""

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for clients of Anthropic's Messages API, which add `/v1` themselves."""
        return self.base_url.removesuffix("/").removesuffix("/v1")


class Span(NamedTuple):
    """Consecutive tokens that were sampled with the same weights."""

    version: WeightVersion
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer of a policy to one request.

    P prompt tokens, C completion tokens.
    """

    message: Message
    finish_reason: FinishReason
    tokens: SampledTokens | None = None
    """Its token ids and log-probs, as a place in a chain; None if the endpoint has none."""
    stop_text: str = ""
    """The stop text that ended it; empty if none did, and where that is not known, as in evals."""
    oldest_version: WeightVersion = 0
    """Weights that sampled the first token."""
    newest_version: WeightVersion = 0
    """Weights that sampled the last token; newer than the oldest if an update came in between."""
    spans: tuple[Span, ...] = ()
    """The weights that sampled each run of tokens, in order; empty if only the two versions above
    are known."""
    num_prompt_tokens: int = 0
    """P, which is known even where the ids are not."""
    num_completion_tokens: int = 0
    """C, which is known even where the ids are not."""
    is_counted: bool = True
    """Whether P and C are known; both are 0 where the endpoint did not say them."""
    num_cached_tokens: int | None = None
    """Those of P that the endpoint had in its cache; None if it did not say so."""
    num_reasoning_tokens: int | None = None
    """Those of C that are thinking; None if the endpoint did not say so."""
    num_retries: int = 0
    """Times that the request was sent again before this answer came."""
    logprobs_json: str = ""
    """The log-probs of a choice as the endpoint sent them, for the program that asked for them;
    empty = none came. A `Turn` does not keep them."""

    @property
    def prompt_ids(self) -> "array[int]":
        """[P] exactly as the server saw them; a copy, empty if there are no tokens."""
        return array("i") if self.tokens is None else self.tokens.prompt_ids

    @property
    def completion_ids(self) -> "array[int]":
        """[C] exactly as sampled, the token that ended the turn included; a copy, or empty."""
        return array("i") if self.tokens is None else self.tokens.completion_ids

    @property
    def logprobs(self) -> "array[float]":
        """[C] nats, of the distribution that was sampled from; a copy, or empty."""
        return array("f") if self.tokens is None else self.tokens.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call of a rollout, ids and log-probs exactly as sampled."""

    completion: Completion
    started_s: float
    """Time at which the request was sent, on the monotonic clock."""
    ended_s: float
    """Time at which its answer was complete, on the same clock."""
    temperature: float | None = None
    """The temperature of this turn; None = that of the rollout."""
    agent: str = ""
    """Digest of the asking agent's system message, which identifies the agent; empty = it had
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInfo:
    """A note about one turn that is kept with the rollout, such as the output of a program."""

    turn: int
    """Number of the turn it belongs to, 0 first."""
    key: str
    """Name of the note."""
    value: str
    kind: Literal["text", "code", "stdout", "stderr"] = "text"
    """The format in which reports show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRange:
    """The declared range of a metric, for reports."""

    low: float | None = None
    """Smallest possible value; None = no limit is known."""
    high: float | None = None
    """Largest possible value; None = no limit is known."""
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at one example."""

    environment: str
    example_id: str
    """Empty when it failed before the example was read."""
    group_id: str
    """The rollouts of one example share it."""
    index: int
    """Position in its group, 0 .. G-1."""
    attempt: int = 1
    """Number of the attempt, 1 first."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, prompt first."""
    turns: tuple[Turn, ...] = ()
    """The model calls, in order."""
    conversations: tuple[tuple[Message, ...], ...] = ()
    """The conversations of a program that used the rollout's endpoint: each one that does not
    continue an earlier one. Empty if no program used it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that its model calls offered, in OpenAI's format; of several with one name the
    last. A gold answer has those of its last turn, which training on it has to show as well."""
    stop_reason: StopReason = StopReason.COMPLETED
    status: RolloutStatus = RolloutStatus.KEPT
    status_reason: str = ""
    error: str | None = None
    """`Type: message` of what failed; None unless the status is failed."""
    reward: float | None = None
    """None until it is scored. A failed rollout never has one: a failure is not a reward of 0."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Unweighted value of each reward function, by name."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """The reward of each agent that has one of its own, by `Turn.agent`; empty = all have
    `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Value of each metric of the environment, by name."""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short texts by name, to group and filter rollouts by."""
    golden_answers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Right answers, by name."""
    info: tuple[TurnInfo, ...] = ()
    """Notes of the environment, turn by turn."""
    score_s: float = 0.0
    """Seconds spent in reward functions."""
    num_lost_retries: int = 0
    """Times that requests were sent again which got no answer in the end; no turn counts them."""
    lost_tokens: SpentTokens | None = NOTHING_SPENT
    """Tokens of requests without a usable answer, which no turn counts; None if not known."""

    @property
    def rollout_id(self) -> str:
        """Unique within a run, and the same for each attempt."""
        return f"{self.group_id}/{self.index}"

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
        """Whether the environment's process died during it, so that its end says nothing."""
        return (
            self.status is RolloutStatus.FAILED and self.status_reason == "EnvironmentProcessError"
        )

    @property
    def is_innocent(self) -> bool:
        """Whether another rollout is known to be the reason for the death of that process."""
        return self.is_lost and LOST_TO in self.tags

    @property
    def is_truncated(self) -> bool:
        """Whether any turn was cut by `max_tokens`."""
        return any(turn.completion.finish_reason == "length" for turn in self.turns)

    @property
    def is_refused(self) -> bool:
        """Whether the endpoint declined to answer in any turn."""
        return any(turn.completion.message.refusal for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one example: the unit of credit."""

    id: str
    environment: str
    example_id: str
    rollouts: tuple[Rollout, ...]
    """[G] in the order of their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDescription:
    """The properties that an environment declares before anything is played."""

    name: str
    version: str
    reward_min: float
    """Lowest possible reward."""
    reward_max: float
    """Highest possible reward."""
    success_threshold: float
    """Rewards from here on count as solved in pass@k."""
    num_examples: Mapping[Split, int | None]
    """Number of examples in each split that it has; None = endless."""
    num_dropped: Mapping[Split, int] = field(default_factory=dict[Split, int])
    """Number of rows of its tables that were left out of each split, as they repeat others or are
    held out by the other split; none where it is not known."""
    network: Literal["none", "load", "always"]
    """When the environment needs the network: never, to load its data, or while rollouts are
    played."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables it may read."""
    dataset_revisions: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, MetricRange] = field(default_factory=dict[str, MetricRange])
    """Ranges of the metrics that it declares, by name."""
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor of each part of the reward in their sum, by name; empty where it is no such sum, or
    where it is not known."""
    has_group_rewards: bool = False
    """Whether a rollout's reward depends on the other rollouts of its example."""
    system_prompt: str = ""
    """Text of the first system message, unless the environment builds its first messages in another
    way."""
    offers_tools: bool = False
    """Whether its requests offer tools, so that the policy's chat template has to support them."""
    sends_system: bool | None = None
    """Whether rollouts are known to begin with a system message; None = see `system_prompt`."""
    goes_on: bool | None = None
    """Whether rollouts continue after an answer without a tool call; None = not known."""
    max_turns: int | None = None
    """Most requests of one rollout to the policy; None = not known."""
