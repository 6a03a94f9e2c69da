"""Models that an environment asks besides the policy, at any OpenAI-compatible endpoint.

Judges and simulated users are built on this: limits, retries, and what it cost as metrics.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

from pydantic import Field

from telescope_core.chat.client import ChatClient
from telescope_core.chat.http import RequestLimits
from telescope_core.environments.settings import Settings
from telescope_core.environments.usage import count
from telescope_core.errors import ConfigError, EndpointError, JudgeError
from telescope_core.parsers import without_thinking
from telescope_core.types import Completion, Message, Sampling

Result = TypeVar("Result")
_MILLION = 1_000_000


class HelperModelConfig(Settings):
    """Where a model is, how it is sampled, and how much may be asked of it."""

    base_url: str = ""
    """Of an OpenAI-compatible endpoint, such as `http://127.0.0.1:8001/v1`."""
    model: str = ""
    """Name of the model there; empty = the only one it serves."""
    api_key_env: str = ""
    """Environment variable that holds the API key, one of the environment's `secrets`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Tokens of one answer."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Requests at the same time; further ones wait."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """How often it is asked when its answer cannot be used."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds one request may take."""
    retry_budget_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds a request may spend failing, busy endpoints included, before it is given up."""
    prompt_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million prompt tokens; with 0 no cost is counted."""
    completion_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million completion tokens."""


class Owner(Protocol):
    """The environment on whose behalf a model is asked."""

    def secret(self, name: str) -> str:
        """Return a declared secret."""
        ...

    def on_close(self, release: Callable[[], object]) -> None:
        """Call (and await) `release` when the environment is closed."""
        ...


class HelperModel:
    """One model; `role` names it in metrics, such as `judge/cost`, and in errors."""

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
        """Return what `read` makes of the answer; a ValueError of it is told, and asked again.

        Raises JudgeError when no attempt gives anything that `read` takes, or when the endpoint
        fails for good. `wanted` says what the answer should have been.
        """
        asked = list(messages)
        problem = ""
        for _ in range(self._config.max_attempts):
            completion = await self._complete(asked)
            text = without_thinking(completion.message.content)
            try:
                return read(text)
            except ValueError as error:
                problem = str(error)
            if completion.finish_reason == "length":
                problem += f" (it was cut at max_tokens = {self._config.max_tokens})"
            again = f"That cannot be used: {problem}. Answer with {wanted}, and nothing else."
            asked = [*messages, completion.message, Message(role="user", content=again)]
        raise JudgeError(
            f"{self._where}: no usable answer in {self._config.max_attempts} attempts; the last "
            f"one: {problem}"
        )

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def _where(self) -> str:
        return f"{self._role} {self._config.model or 'model'} at {self._config.base_url}"

    async def _complete(self, messages: Sequence[Message]) -> Completion:
        config = self._config
        sampling = Sampling(max_tokens=config.max_tokens, temperature=config.temperature)
        async with self._lanes:
            client = self._opened()
            try:
                completion = await client.complete(messages, sampling)
            except EndpointError as error:
                raise JudgeError(f"{self._where}: {error}") from error
        prompt_tokens, tokens = completion.num_prompt_tokens, completion.num_completion_tokens
        count(f"{self._role}/calls", 1.0)
        count(f"{self._role}/prompt_tokens", prompt_tokens)
        count(f"{self._role}/completion_tokens", tokens)
        if config.prompt_price or config.completion_price:
            cost = prompt_tokens * config.prompt_price + tokens * config.completion_price
            count(f"{self._role}/cost", cost / _MILLION)
        return completion

    def _opened(self) -> ChatClient:
        if self._client is None:
            config = self._config
            if not config.base_url:
                raise ConfigError(
                    f"the {self._role} has no base_url; set it, for instance with "
                    f"--env.{self._role}.base_url http://127.0.0.1:8001/v1"
                )
            self._client = ChatClient(
                config.base_url,
                config.model or None,
                api_key=self._owner.secret(config.api_key_env) if config.api_key_env else None,
                limits=RequestLimits(
                    request_timeout_s=config.request_timeout_s,
                    retry_budget_s=config.retry_budget_s,
                ),
            )
        return self._client
