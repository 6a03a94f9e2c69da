"""`RecordingPolicy`: a policy that records each of its answers itself, with a `Recorder`.

`ForwardingPolicies` gives each rollout of an eval such a policy, with its own endpoint in front of
the evaluated one. The token-exact policy of training is another such policy. With `recording`, the
rollouts of an environment hold the records of their policies.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import eq
from typing import Any, cast

from telescope_core.base.errors import (
    NOTHING_SPENT,
    EndpointError,
    EndpointLostError,
    EnvironmentLoadError,
    SpentTokens,
    TelescopeError,
)
from telescope_core.base.messages import agent_of, tool_name
from telescope_core.base.protocols import EnvironmentClient, PlayRequest, Policy
from telescope_core.base.retries import (
    FAILED_BY,
    as_cancelled,
    as_failed,
    failed_by,
    is_too_long,
    says_too_long,
)
from telescope_core.base.seeds import ENDPOINT_BITS, TurnSeeds
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    JsonValue,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    StopReason,
    Tools,
    Turn,
)
from telescope_core.chat.client import ChatClient, sampling_fields
from telescope_core.chat.trouble import Watch, watching
from telescope_core.gateway.gateway import Gateway, Session
from telescope_core.gateway.messages import read_loosely
from telescope_core.gateway.refusal import Refusal, is_empty, unsupported
from telescope_core.gateway.request import (
    NEUTRAL,
    ChatRequest,
    flag,
    given_fields,
    include_usage,
    max_tokens_of,
    read_tools,
)
from telescope_core.parsers.tool_calls import canonical_arguments


class Recorder:
    """The turns of one rollout, and the conversations that a program had at its endpoint.

    An environment asks with `episode.generate`; a program that it runs asks at the endpoint.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        """Every answer so far, in the order in which the answers ended."""
        self.leaves_out_thinking = False
        """Whether a program sent back a turn without the thinking that it had received with it."""
        self.was_asked = False
        """Whether there was any request."""
        self.is_out_of_context = False
        """Whether the latest request did not fit the model's context, though earlier ones did."""
        self.refused: EndpointError | None = None
        """The latest refusal of what a request holds."""
        self.num_lost_retries = 0
        """Times that requests were sent again which got no answer in the end."""
        self.num_uncounted = 0
        """Requests whose tokens are not known: those without an end, and some that failed."""
        self._lost_tokens = NOTHING_SPENT
        self._tools: dict[str, Mapping[str, JsonValue]] = {}
        self._unanswered: dict[tuple[Message, ...], TelescopeError] = {}
        self._conversations: list[list[Message]] = []

    @property
    def failure(self) -> TelescopeError | None:
        """The error of a request that failed and did not succeed later; None = there is none."""
        return next(iter(self._unanswered.values()), None)

    @property
    def lost_tokens(self) -> SpentTokens | None:
        """Tokens of requests without a usable answer; None = how many is not known."""
        return None if self.num_uncounted else self._lost_tokens

    @property
    def tools(self) -> tuple[Mapping[str, JsonValue], ...]:
        """The tools that requests offered, in the order in which they came; see `Rollout.tools`."""
        return tuple(self._tools.values())

    def lost(self, error: EndpointError) -> None:
        """Record what a request has used that ended with `error`."""
        self.num_lost_retries += error.num_retries
        if error.spent is not None:
            self.num_uncounted -= 1
            prompt, completion = self._lost_tokens
            self._lost_tokens = SpentTokens(
                prompt + error.spent.prompt, completion + error.spent.completion
            )

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """Each conversation of the program that does not continue an earlier one."""
        return tuple(tuple(one) for one in self._conversations)

    def failed(self, asked: tuple[Message, ...], error: TelescopeError) -> None:
        """Record `error` until the same messages are answered.

        A program may ignore the error and continue, and its reward must then not count for the
        policy. A later turn that does not fit the context is no such error: it is a limit of the
        policy.
        """
        if self.turns and is_too_long(error):
            self.is_out_of_context = True
            return
        self._unanswered[asked] = error

    def answered(self, asked: tuple[Message, ...], turn: Turn, tools: Tools = ()) -> None:
        """Record the answer to `asked`, which offered `tools`."""
        self._unanswered.pop(asked, None)
        self._tools |= {tool_name(tool): tool for tool in tools}
        self.is_out_of_context = False
        self.turns.append(replace(turn, agent=agent_of(asked)))

    def heard(self, asked: Sequence[Message], completion: Completion) -> None:
        """Record a program's request at the endpoint, and its answer."""
        said, asked = self._continued(asked)
        if said is None:
            self._conversations.append([*asked, completion.message])
            return
        self.leaves_out_thinking |= any(map(_lost_thinking, said, asked))
        said += (*asked[len(said) :], completion.message)

    def _continued(
        self, asked: Sequence[Message]
    ) -> tuple[list[Message] | None, Sequence[Message]]:
        """Return the conversation that `asked` goes on from, and `asked` with the ids of its calls.

        The first is None if `asked` goes on from none.

        Several may be the same but for their form, such as those of a program that asked the same
        thing twice. The longest is taken, of these the one with the most messages that came back
        as they were, and of these the latest, which the tokens of training go on from too.
        """
        shorter = [said for said in reversed(self._conversations) if len(said) <= len(asked)]
        fitting = [(said, asked) for said in shorter if all(map(_is_same, said, asked))]
        if not fitting:
            sent = ((said, _with_ids_of(said, asked)) for said in shorter)
            renamed = [(said, theirs) for said, theirs in sent if theirs is not asked]
            fitting = [one for one in renamed if all(map(_is_same, *one))]
        return max(
            fitting,
            key=lambda one: (len(one[0]), sum(map(eq, *one))),
            default=(None, asked),
        )


def _with_ids_of(said: Sequence[Message], asked: Sequence[Message]) -> Sequence[Message]:
    """Return `asked` with the ids that its calls have in `said`; some programs write their own."""
    ids: dict[str | None, str] = {}
    for known, sent in zip(said, asked, strict=False):
        pairs = zip(known.tool_calls, sent.tool_calls, strict=False)
        ids |= {theirs.id: ours.id for ours, theirs in pairs if theirs.id != ours.id}
    if not ids:
        return asked
    return [
        replace(
            one,
            tool_calls=tuple(
                replace(call, id=ids.get(call.id, call.id)) for call in one.tool_calls
            ),
            tool_call_id=ids.get(one.tool_call_id, one.tool_call_id),
        )
        for one in asked
    ]


def _is_same(known: Message, sent: Message) -> bool:
    """Return whether a program sends back a message that it received, perhaps reformatted.

    Only thinking and a refusal may be missing in what it sends back.
    """
    return known == sent or (
        known.role == sent.role
        and known.tool_call_id == sent.tool_call_id
        # Anthropic's API has no other place for a refusal than the content.
        and sent.content.strip()
        in (known.content.strip(), (known.content or known.refusal).strip())
        and _is_same_or_missing(known.reasoning, sent.reasoning)
        and _is_same_or_missing(known.refusal, sent.refusal)
        and _pictures(known) == _pictures(sent)
        and (known.tool_calls == sent.tool_calls or _calls(known) == _calls(sent))
    )


def _is_same_or_missing(known: str, sent: str) -> bool:
    return not known or not sent or known.strip() == sent.strip()


def _pictures(message: Message) -> list[tuple[str, str]]:
    return [(image.media_type, image.data) for image in message.images]


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [(one.id, one.name, canonical_arguments(one.arguments)) for one in message.tool_calls]


def _lost_thinking(known: Message, sent: Message) -> bool:
    return bool(known.reasoning) and not sent.reasoning


class RecordingPolicy(ABC):
    """One rollout's policy, with a record of its requests and answers."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.session: Session | None = None

    @property
    def turns(self) -> list[Turn]:
        """Every answer so far, in the order in which they ended."""
        return self.recorder.turns

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """Address of this policy at the gateway, for this rollout alone."""
        return self.session.endpoint if self.session is not None else None

    @property
    def trouble(self) -> str:
        """The error that the endpoint behind this policy returns; empty = none."""
        return ""

    @property
    def num_lost_retries(self) -> int:
        """Times that requests were sent again which got no answer."""
        return self.recorder.num_lost_retries

    @property
    def refusal(self) -> str:
        """Why the last request of a program that was refused was; empty = none was refused."""
        return self.session.refusal if self.session is not None else ""

    def close(self) -> None:
        """End the endpoint and cancel the requests that are waiting there. Idempotent."""
        if self.session is not None:
            self.session.end()

    @abstractmethod
    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        """Answer the environment, and record it."""

    @abstractmethod
    async def answer(self, request: ChatRequest) -> Completion:
        """Answer a program at the endpoint, and record it with its conversation."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        raise Refusal(
            "tokens are counted in training alone: the endpoint of an eval is not asked for it; "
            "let the program estimate them",
            code="unknown_url",
            status=404,
        )


@asynccontextmanager
async def forwarding(
    client: ChatClient, *, host: str = "127.0.0.1"
) -> AsyncGenerator["ForwardingPolicies", None]:
    """Start a gateway on `host` in front of the endpoint of `client`; yields policies for evals."""
    gateway = Gateway(model=await client.model(), host=host, read=read_forwarded)
    await gateway.start()
    try:
        yield ForwardingPolicies(client, gateway)
    finally:
        await gateway.close()


class ForwardingPolicies:
    """Gives each rollout of an eval a policy that passes its requests on to `client`."""

    def __init__(self, client: ChatClient, gateway: Gateway) -> None:
        self._client = client
        self._gateway = gateway

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "ForwardingPolicy":
        """Return the policy of one rollout; it has an endpoint only if `sampling` is given."""
        policy = ForwardingPolicy(self._client, None if sampling is None else sampling.seed)
        if sampling is not None:
            policy.session = self._gateway.open(policy, sampling)
        return policy

    async def close(self) -> None:
        """Do nothing: the client and the gateway are closed by whoever opened them."""


class ForwardingPolicy(RecordingPolicy):
    """Passes requests on to a chat endpoint and records the answers."""

    def __init__(self, client: ChatClient, seed: int | None) -> None:
        super().__init__()
        self._client = client
        self._seeds = TurnSeeds(seed, num_bits=ENDPOINT_BITS)
        self._waiting: list[Watch] = []

    @property
    def trouble(self) -> str:
        """The troubles of the requests that are waiting, or were cancelled while waiting."""
        return "; ".join(dict.fromkeys(watch.text for watch in self._waiting if watch.text))

    @property
    def num_lost_retries(self) -> int:
        """Those of requests that failed, and of those that the end of the rollout cut off."""
        return super().num_lost_retries + sum(watch.num_retries for watch in self._waiting)

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        """Ask the endpoint for a turn, on behalf of the environment."""
        asked = tuple(messages)
        sampling = self._seeds.seeded(sampling)
        return await self._recorded(
            asked, sampling, self._client.complete(asked, sampling, tools=tools), tools
        )

    async def answer(self, request: ChatRequest) -> Completion:
        """Pass the request of a program on as it is."""
        asked, fields = request.messages, dict(request.fields)
        seed = fields.get("seed")
        if isinstance(seed, int):
            fields["seed"] = self._seeds.next(seed)
        asking = self._client.request(fields)
        tools = cast(Tools, fields.get("tools") or ())
        completion = await self._recorded(asked, request.sampling, asking, tools)
        self.recorder.heard(asked, completion)
        return completion

    async def _recorded(
        self,
        asked: tuple[Message, ...],
        sampling: Sampling,
        asking: Awaitable[Completion],
        tools: Tools,
    ) -> Completion:
        started_s = time.monotonic()
        self.recorder.was_asked = True
        self.recorder.num_uncounted += 1
        with watching() as watch:
            self._waiting.append(watch)
            try:
                completion = await asking
            except EndpointError as error:
                self._waiting.remove(watch)
                self.recorder.lost(error)
                # What the endpoint refuses of this one request is for the program to deal with,
                # such as by a shorter history.
                if not error.is_of_request or (self.turns and is_too_long(error)):
                    self.recorder.failed(asked, error)
                else:
                    self.recorder.refused = error
                raise
            # One that is cancelled stays: its trouble may be why the deadline passed.
            self._waiting.remove(watch)
        self.recorder.num_uncounted -= 1
        turn = Turn(
            completion=replace(completion, logprobs_json=""),
            started_s=started_s,
            ended_s=time.monotonic(),
            temperature=sampling.temperature,
        )
        self.recorder.answered(asked, turn, tools)
        return completion


UNRECORDED = ("n", "best_of", "functions", "function_call", "modalities", "audio")
"""Parameters that ask for something other than one message of text and calls."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_OUR_OWN = ("model", "stream", "stream_options")


def read_forwarded(body: object, own: Sampling, *, model: str) -> ChatRequest:
    """Read a request to a rollout whose sampling settings are `own`; raises Refusal."""
    given = given_fields(body, model=model)
    for name in UNRECORDED:
        changes_nothing, why = NEUTRAL[name]
        if name in given and not is_empty(given[name]) and not changes_nothing(given[name]):
            raise unsupported(name, why)
    if tools := given.get("tools"):
        read_tools(tools)
    stream = flag(given, "stream")
    options = include_usage(given.get("stream_options"), stream=stream)
    fields = _filled_in(given, own)
    temperature = fields.get("temperature")
    return ChatRequest(
        messages=read_loosely(given.get("messages")),
        sampling=replace(own, temperature=temperature, max_tokens=_limit(given, own)),
        stream=stream,
        include_usage=options,
        fields=fields,
    )


def _filled_in(given: Mapping[str, Any], own: Sampling) -> dict[str, Any]:
    passed = {name: value for name, value in given.items() if name not in (*_OUR_OWN, *_LIMITS)}
    fields = {**sampling_fields(own), **passed}
    # The name that the program used, which the endpoint may want; else that of the eval.
    limit = next((name for name in reversed(_LIMITS) if name in given), "max_tokens")
    fields.pop("max_tokens")
    return {**fields, limit: _limit(given, own)}


def _limit(given: Mapping[str, Any], own: Sampling) -> int:
    return min(own.max_tokens, max_tokens_of(given) or own.max_tokens)


class RecordedEnvironment:
    """Wraps `play` of any environment client; other calls go straight to the client."""

    def __init__(
        self, client: EnvironmentClient, *, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`note` is called once with each remark for the author of the environment."""
        self._client = client
        self._note = note
        self._noted: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play `request`; the endpoint of a recording policy closes with the rollout."""
        if not isinstance(policy, RecordingPolicy):
            return await self._client.play(request, policy)
        try:
            rollout = await self._client.play(request, policy)
        finally:
            policy.close()
        recorded = as_recorded(rollout, policy)
        for kind, text in _remarks(recorded, policy):
            if kind not in self._noted:
                self._noted.add(kind)
                self._note(f"{self._client.name}: its program {text}")
        return recorded


def _remarks(rollout: Rollout, policy: RecordingPolicy) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each remark about the program that played `rollout`."""
    if policy.recorder.leaves_out_thinking:
        yield (
            "thinking",
            "leaves out the thinking of earlier turns (reasoning_content), so in training each "
            "later turn is a sample of its own; see docs/how-to/bring-an-agent.md",
        )
    # One that shortens its history when it is told to does what it should.
    is_told_to_shorten = says_too_long(policy.refusal)
    if rollout.status is RolloutStatus.KEPT and policy.refusal and not is_told_to_shorten:
        yield (
            "refusal",
            f"went on after a request was refused, and its reward counts: {policy.refusal}",
        )


def recording(
    client: EnvironmentClient, *, note: Callable[[str], None] = lambda text: None
) -> EnvironmentClient:
    """Return `client` as an environment whose rollouts hold the record of their policies."""
    # It has every method of the protocol, though most of them by `__getattr__`.
    return cast(EnvironmentClient, RecordedEnvironment(client, note=note))


def as_recorded(rollout: Rollout, policy: RecordingPolicy) -> Rollout:
    """Return `rollout` with the record of `policy`; failed if the model did not answer.

    A program may swallow the error and go on, but its reward then says nothing about the policy.
    """
    recorder = policy.recorder
    rollout = replace(
        rollout,
        turns=tuple(policy.turns),
        conversations=recorder.conversations or rollout.conversations,
        tools=recorder.tools,
        num_lost_retries=policy.num_lost_retries,
        lost_tokens=recorder.lost_tokens,
    )
    if rollout.stop_reason is StopReason.TIMEOUT:
        return _timed_out(rollout, policy)
    is_over = rollout.status in (RolloutStatus.KEPT, RolloutStatus.FAILED)
    if not is_over:
        return rollout
    if recorder.failure is not None:
        name = type(recorder.failure).__name__
        is_full = is_too_long(recorder.failure)
        reason = StopReason.CONTEXT_LENGTH if is_full else StopReason.ERROR
        return as_failed(rollout, f"{name}: {recorder.failure}", reason)
    if recorder.is_out_of_context and rollout.tags.get("failed_in") != "reward":
        # A program that ends, or breaks, when it is told that its history is too long.
        return replace(rollout, stop_reason=StopReason.CONTEXT_LENGTH)
    if rollout.status is RolloutStatus.KEPT and not rollout.turns:
        advice = (
            "see that the program uses episode.endpoint and no cache of earlier answers, and what "
            "it printed"
        )
        if policy.refusal:
            advice = f"{_REFUSED}: {policy.refusal}"
        text = (
            "its program ended without an answer of the model, so its reward would say nothing "
            f"about the model; {advice}"
        )
        return as_failed(rollout, f"{EnvironmentLoadError.__name__}: {text}")
    if recorder.refused is not None and str(recorder.refused) in (rollout.error or ""):
        # A worker's error does not hold the status, which says that it came of what was asked.
        return replace(rollout, tags={**rollout.tags, FAILED_BY: failed_by(recorder.refused)})
    return rollout


_REFUSED = "the last request that was refused"


def canceled_attempt(
    name: str, request: PlayRequest, policy: Policy | None, *, attempt: int
) -> Rollout:
    """Return the rollout of a canceled attempt: with the turns so far, if they are kept.

    `policy`: None = it was canceled before it had one.
    """
    is_recorded = isinstance(policy, RecordingPolicy)
    rollout = replace(
        request.rollout(name),
        attempt=attempt,
        turns=tuple(policy.turns) if is_recorded else (),
        conversations=policy.recorder.conversations if is_recorded else (),
        tools=policy.recorder.tools if is_recorded else (),
        num_lost_retries=policy.num_lost_retries if is_recorded else 0,
        lost_tokens=policy.recorder.lost_tokens if is_recorded else NOTHING_SPENT,
    )
    return as_cancelled(rollout)


def _timed_out(rollout: Rollout, policy: RecordingPolicy) -> Rollout:
    """Return a rollout that a time limit ended; failed if a missing answer may be the reason."""
    recorder = policy.recorder
    if isinstance(recorder.failure, EndpointLostError):
        # No limit of the rollout's, so it is to be played again.
        error = f"{EndpointLostError.__name__}: {recorder.failure}"
        return as_failed(rollout, error)
    why = ""
    if not recorder.was_asked:
        why = " before it asked the model for anything"
    elif recorder.failure is not None:
        why = f" after a request to the model had failed: {recorder.failure}"
    if rollout.status is RolloutStatus.KEPT and (why or policy.trouble):
        limit = rollout.tags.get("time_limit")
        ended = "a time limit ended the rollout"
        if limit is not None:
            ended = f"its program was ended after {limit}"
        error = f"TimeoutError: {ended}{why}"
        rollout = as_failed(rollout, error, StopReason.TIMEOUT)
    error, trouble = rollout.error, policy.trouble
    if error is None:
        return rollout
    if trouble and trouble not in error:
        error += f", while the model's endpoint was in trouble: {trouble}"
    if policy.refusal and not rollout.turns:
        error += f"; {_REFUSED}: {policy.refusal}"
    return replace(rollout, error=error)
