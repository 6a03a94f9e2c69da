"""Helper models: those that an environment uses besides the policy, at OpenAI-compatible endpoints.

Judges and `UserSimulator` are built on `HelperModel`, which applies limits, retries unusable
answers, and records calls, tokens and cost as metrics of the rollout.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, Field

from telescope_core.base.errors import (
    NOTHING_SPENT,
    ConfigError,
    EndpointAccessError,
    EndpointError,
    JudgeError,
    SpentTokens,
    UnplayableError,
)
from telescope_core.base.images import with_marks
from telescope_core.base.secret_names import without_passwords
from telescope_core.base.types import Completion, Message, Sampling
from telescope_core.chat.client import ApiKey, ChatClient, Options
from telescope_core.chat.http import RequestLimits
from telescope_core.chat.trouble import watching
from telescope_core.environments.settings import Settings
from telescope_core.environments.tool_calls import answer_in, without_results
from telescope_core.environments.usage import count, count_unknown, remark, require_may_ask
from telescope_core.parsers import without_thinking

Result = TypeVar("Result")
Temperature = Annotated[float, Field(ge=0)]
_MILLION = 1_000_000


def _a_name(text: str) -> str:
    # A key that was pasted would be recorded with the settings.
    if text and not text.isidentifier():
        raise ValueError("expected the name of an environment variable that holds the key")
    return text


class HelperModelConfig(Settings):
    """The address of a helper model, how to sample it, and limits on its use."""

    base_url: str = ""
    """Base URL of an OpenAI-compatible endpoint, such as `http://127.0.0.1:8001/v1`."""
    model: str = ""
    """Name of the model at the endpoint; empty = the only one it serves."""
    api_key_env: Annotated[str, AfterValidator(_a_name)] = ""
    """Environment variable that holds the API key; must be one of the environment's `secrets`."""
    temperature: Temperature = 0.0
    """0 = greedy. Unless it is set, it is left out at an endpoint that refuses it."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Most tokens of one answer."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, in the endpoint's names, such as reasoning_effort."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Most requests at once; further ones wait."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Most requests for one usable answer; after an unusable answer, the next one is sent."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Most seconds for one request."""
    retry_budget_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds for which a failed request is retried, for example at a busy endpoint."""
    prompt_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million prompt tokens; no cost is recorded when both prices are 0."""
    completion_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million completion tokens."""


class Owner(Protocol):
    """The environment that uses the model; an `Environment` is one."""

    def secret(self, name: str) -> str:
        """Return the value of a secret that the environment declares."""
        ...

    def on_close(self, release: Callable[[], object]) -> None:
        """Call `release`, and await its result if needed, when the environment is closed."""
        ...


class HelperModel:
    """One helper model; `role` names it in errors and in metrics such as `judge/cost`."""

    def __init__(self, config: HelperModelConfig, owner: Owner, *, role: str) -> None:
        self._config = config
        self._owner = owner
        self._role = role
        self._client: ChatClient | None = None
        self._lanes = asyncio.Semaphore(config.max_concurrent)
        owner.on_close(self.close)

    async def ask(
        self, messages: Sequence[Message], read: Callable[[str], Result], *, wanted: str
    ) -> Result:
        """Ask the model and return `read(answer)`.

        If `read` raises ValueError, the model gets the error and is called again; `wanted`
        describes the expected answer. Raises JudgeError if `read` accepts no answer within
        `max_attempts` requests, or if the endpoint fails.
        """
        require_may_ask(self._role)
        asked = list(messages)
        problem = ""
        for _ in range(self._config.max_attempts):
            try:
                completion = await self._complete(asked)
            except JudgeError as error:
                if not problem:
                    raise
                raise JudgeError(
                    f"{error}; it was asked again, because its answer before could not be used: "
                    f"{problem}"
                ) from error
            text = without_thinking(completion.message.content)
            try:
                found = read(text)
            except ValueError as error:
                problem = str(error)
            else:
                self._remark_cut(completion)
                return found
            problem += self._ending(completion)
            again = f"That cannot be used: {problem}. Answer with {wanted}, and nothing else."
            asked = [*messages, completion.message, Message(role="user", content=again)]
        raise JudgeError(
            f"{self._where}: no usable answer in {self._config.max_attempts} attempts; the last "
            f"problem was: {problem}"
        )

    def _ending(self, completion: Completion) -> str:
        """Return a remark on how an unusable answer ended, if that may be the reason."""
        if completion.finish_reason == "length":
            return f" (it was cut at max_tokens = {self._config.max_tokens})"
        if completion.finish_reason == "content_filter":
            return " (the endpoint's content filter stopped it)"
        if completion.message.refusal:
            return f" (the model refused: {completion.message.refusal})"
        return ""

    def _remark_cut(self, completion: Completion) -> None:
        """Count a usable answer that is not whole, such as half a sentence of a simulated user."""
        if completion.finish_reason == "length":
            count(f"{self._role}/truncated", 1.0)
            most = self._config.max_tokens
            remark(self._role, f"a reply was used that was cut at max_tokens = {most}")
        elif completion.finish_reason == "content_filter":
            count(f"{self._role}/filtered", 1.0)
            remark(self._role, "a reply was used that the endpoint's content filter stopped")

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def _where(self) -> str:
        shown = without_passwords(self._config.base_url)
        return f"{self._role} {self._config.model or 'model'} at {shown}"

    async def _complete(self, messages: Sequence[Message]) -> Completion:
        config = self._config
        sampling = Sampling(
            max_tokens=config.max_tokens, temperature=config.temperature, extra=config.extra_body
        )
        async with self._lanes:
            client = self._opened()
            try:
                completion = await self._counted(client.complete(messages, sampling))
            except ConfigError as error:
                # Which of several models is meant is a matter of the settings.
                raise UnplayableError(f"{self._where}: {error}") from error
            except EndpointAccessError as error:
                raise EndpointAccessError(f"{self._where}: {error}") from error
            except EndpointError as error:
                if error.num_retries:
                    count(f"{self._role}/http_retries", error.num_retries)
                if error.spent != NOTHING_SPENT:
                    self._count_call(error.spent)
                raise JudgeError(f"{self._where}: {error}") from error
        if completion.num_retries:
            count(f"{self._role}/http_retries", completion.num_retries)
        spent = SpentTokens(completion.num_prompt_tokens, completion.num_completion_tokens)
        self._count_call(spent if completion.is_counted else None)
        return completion

    async def _counted(self, asking: Awaitable[Completion]) -> Completion:
        """Await the answer; if it is cut off, count how often the request was sent again."""
        with watching() as watch:
            try:
                return await asking
            except asyncio.CancelledError:
                if watch.num_retries:
                    count(f"{self._role}/http_retries", watch.num_retries)
                raise

    def _count_call(self, spent: SpentTokens | None) -> None:
        """Count a call with its tokens and their cost; None = how many is not known."""
        config = self._config
        count(f"{self._role}/calls", 1.0)
        if spent is None:
            count_unknown(
                *(f"{self._role}/{name}" for name in ("prompt_tokens", "completion_tokens", "cost"))
            )
        prompt_tokens, tokens = spent or NOTHING_SPENT
        count(f"{self._role}/prompt_tokens", prompt_tokens)
        count(f"{self._role}/completion_tokens", tokens)
        if config.prompt_price or config.completion_price:
            cost = prompt_tokens * config.prompt_price + tokens * config.completion_price
            count(f"{self._role}/cost", cost / _MILLION)

    def _opened(self) -> ChatClient:
        if self._client is None:
            config = self._config
            option = f"--env.{self._role}"
            if not config.base_url:
                raise UnplayableError(
                    f"the {self._role} has no base_url; set it, for example with "
                    f"{option}.base_url http://127.0.0.1:8001/v1"
                )
            variable = config.api_key_env
            key = ApiKey(self._owner.secret(variable) if variable else "", variable)
            try:
                self._client = ChatClient(
                    config.base_url,
                    config.model or None,
                    api_key=key,
                    # The default must not keep models out that take no temperature.
                    optional=() if "temperature" in config.model_fields_set else ("temperature",),
                    limits=RequestLimits(
                        request_timeout_s=config.request_timeout_s,
                        retry_budget_s=config.retry_budget_s,
                    ),
                )
            except ConfigError as error:
                raise UnplayableError(f"{self._where}: {error}; see {option}") from error
            self._client.options = Options(
                model=f"{option}.model", api_key_env=f"{option}.api_key_env"
            )
        return self._client


_INSTRUCTIONS = """You play a person who talks to an assistant. Stay in this role, write only what
that person would say, and never help the assistant with its work.

Who you are and what you want:
{instructions}

When you have what you want, or see that you will not get it, answer with {done} alone."""
_BEGIN = Message(role="user", content="(The assistant is listening. Begin.)")


class UserSimulatorConfig(HelperModelConfig):
    """Settings of the user model; the field `user` of a Config gets `--env.user.x` flags."""

    temperature: Temperature = 0.7
    done_text: Annotated[str, Field(min_length=1)] = "[DONE]"
    """Text with which the simulated user ends the conversation."""


class UserSimulator:
    """A simulated user of the assistant.

    Create one in the environment's `__init__`, with the environment as `owner`, and use it for
    every rollout: it keeps no state of a conversation. `role` names it in metrics and errors.
    """

    def __init__(self, config: UserSimulatorConfig, owner: Owner, *, role: str = "user") -> None:
        self._done_text = config.done_text
        self._model = HelperModel(config, owner, role=role)

    async def reply(self, messages: Sequence[Message], *, instructions: str) -> str | None:
        """Return the user's next message; None when the user ends the conversation.

        `messages` is the conversation as the policy sees it. The user sees only what both sides
        said: no system prompts, thinking, tool calls or their results. `instructions` says who the
        user is and what they want. Raises JudgeError when the model gives no usable answer.
        """
        system = _INSTRUCTIONS.format(instructions=instructions.strip(), done=self._done_text)
        asked = [Message(role="system", content=system), _BEGIN, *_as_seen_by_user(messages)]
        return await self._model.ask(asked, self._read, wanted="what the person says next")

    def _read(self, text: str) -> str | None:
        if self._done_text in text:
            return None
        if not text:
            raise ValueError("the answer is empty")
        return text


def _as_seen_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return what both sides said, with roles swapped: the user's words become the model's own.

    Messages of one side that follow each other, such as around a tool call, become one: many
    models take none but alternating roles.
    """
    seen: list[Message] = []
    for before, message in pairwise((None, *messages)):
        if message is None or message.role not in ("user", "assistant"):
            continue
        if message.role == "assistant":
            role, text = "user", answer_in(message.content).spoken
        else:
            role, text = "assistant", without_results(with_marks(message), before)
        if text and seen and seen[-1].role == role:
            seen[-1] = Message(role=role, content=f"{seen[-1].content}\n\n{text}")
        elif text:
            seen.append(Message(role=role, content=text))
    return seen
