"""`ChatClient`: a policy source for any OpenAI-compatible chat endpoint.

It writes requests and reads replies. The module `http` handles connections, deadlines and retries.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from telescope_core.base.chains import ChainRecorder
from telescope_core.base.errors import ConfigError, EndpointAccessError, EndpointError, unknown_name
from telescope_core.base.messages import message_to_json
from telescope_core.base.protocols import Policy
from telescope_core.base.retries import says_too_long
from telescope_core.base.secret_names import without_passwords
from telescope_core.base.seeds import ENDPOINT_BITS, TurnSeeds
from telescope_core.base.types import ChatEndpoint, Completion, Message, Sampling, Tools
from telescope_core.chat.http import Handling, HttpPool, RequestLimits
from telescope_core.chat.replies import (
    read_completion,
    read_models,
    read_token_completion,
    trouble_in,
)

_NOT_TAKEN = (400, 413, 415, 422)
MOST_DENIED = 3
"""Times in a row, without an answer in between, that an endpoint which has answered before may say
401; then the key counts as revoked."""


class ApiKey(NamedTuple):
    """The key to an endpoint."""

    value: str
    """Empty = none is sent."""
    variable: str = ""
    """Name of the environment variable that holds it, for errors."""


class Options(NamedTuple):
    """The options with which a person sets what errors ask for."""

    model: str = "--model"
    api_key_env: str = "--api-key-env"


class ChatClient:
    """Creates policies that use the endpoint at `base_url`, such as `http://127.0.0.1:8000/v1`.

    Without `model`, the endpoint must serve exactly one model, which is used. `with_tokens` asks
    for token ids and log-probs, which vLLM supports but the OpenAI API does not. Clients of
    several endpoints may share a `pool`, which its creator must close. Fields of requests
    that are in `optional` are left out once the endpoint has refused them.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: "str | ApiKey | None" = None,
        optional: Collection[str] = (),
        limits: RequestLimits | None = None,
        with_tokens: bool = False,
        pool: HttpPool | None = None,
    ) -> None:
        is_url = False
        with suppress(ValueError):  # half a pair of brackets
            parts = urlsplit(base_url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        if not is_url:
            raise ConfigError(
                f"base URL {without_passwords(base_url)!r} must begin with http:// or https:// and "
                "a host, such as http://127.0.0.1:8000/v1 or http://[::1]:8000/v1"
            )
        self.base_url = base_url.rstrip("/")
        self._chat_url = f"{self.base_url}/chat/completions"
        self._shown_url = without_passwords(self.base_url)
        self._model = model
        self._model_lock = asyncio.Lock()
        self._api_key = api_key if isinstance(api_key, ApiKey) else ApiKey(api_key or "")
        self._optional = frozenset(optional)
        self.options = Options()
        self._dialect = Dialect()
        self._num_answers = 0
        self._num_denied = 0
        self._revoked: EndpointAccessError | None = None
        self._headers = {"Content-Type": "application/json"}
        host = self.base_url.partition("://")[2].partition("/")[0]
        if self._api_key.value and "@" in host:
            given = f"in {self._api_key.variable} " if self._api_key.variable else ""
            raise ConfigError(
                f"the base URL {self._shown_url} has a user of its own, and an API key was given "
                f"{given}as well; a request can show only one of them, so leave the other out"
            )
        if self._api_key.value:
            self._headers["Authorization"] = f"Bearer {self._api_key.value}"
        self._limits = limits or RequestLimits()
        self._pool = pool or HttpPool()
        self._owns_pool = pool is None
        self._read = read_token_completion if with_tokens else read_completion
        self._extra = {"logprobs": True, "return_token_ids": True} if with_tokens else {}

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of one rollout, which records its tokens if they are asked for.

        With a seed in `sampling`, each of its turns has a seed that follows from it.
        """
        return _ChatPolicy(self, None if sampling is None else sampling.seed)

    @property
    def endpoint(self) -> ChatEndpoint:
        """The endpoint itself; raises ConfigError while the name of its model is not known."""
        if self._model is None:
            raise ConfigError(
                f"the model at {self._shown_url} is not known yet; name it, or await `check` first"
            )
        return ChatEndpoint(
            base_url=self.base_url, api_key=self._api_key.value or "none", model=self._model
        )

    async def close(self) -> None:
        """Close the connections, unless they belong to a shared pool."""
        if self._owns_pool:
            await self._pool.close()

    async def list_models(self) -> list[str]:
        """Return the ids of the models served there."""
        url = f"{self.base_url}/models"
        try:
            reply = await self._pool.request("GET", url, headers=self._headers, limits=self._limits)
        except EndpointError as error:
            if error.status in (401, 403):
                raise await self._refused(error, url) from None
            raise
        try:
            return read_models(reply.content, where=without_passwords(url))
        except EndpointError as error:
            error.status = error.status or 200
            raise

    async def model(self) -> str:
        """Return the name of the model in use; asks the endpoint when none was given."""
        if self._model is None:
            async with self._model_lock:
                if self._model is None:
                    served = await self.list_models()
                    if len(served) != 1:
                        listed = ", ".join(served) or "none"
                        raise ConfigError(
                            f"{self._shown_url} serves {len(served)} models ({listed}); name the "
                            f"one you mean with {self.options.model}"
                        )
                    self._model = served[0]
        return self._model

    async def check(self) -> str | None:
        """Raise a TelescopeError unless the endpoint answers and serves the model.

        Endpoints answer for names that they do not list, such as those of deployments, and to keys
        that may not list. A named model that is not in the list is asked for one token, and a note
        is returned unless the answer says that there is none; one that cannot be looked up is not
        checked further.
        """
        try:
            served = await self.list_models()
        except EndpointError as error:
            needs_key = error.status == 401 or (error.status == 403 and not self._api_key.value)
            if self._model is None or error.status is None or needs_key:
                raise
            return None
        if self._model is None or self._model in served:
            await self.model()
            return None
        unknown = unknown_name("model", self._model, served, f"(served by {self._shown_url})")
        try:
            await self.request({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
        except EndpointError as error:
            is_unknown = error.status in _NOT_TAKEN and "model" in error.answer.lower()
            if error.status == 404 or is_unknown:
                raise unknown from None
        listed = f"{', '.join(served) or 'none':.200}"
        return (
            f"{self._shown_url} does not list the model {self._model!r}, which is used all the "
            f"same; it lists {listed}"
        )

    def require_access(self) -> None:
        """Raise EndpointAccessError if the key was revoked, as far as the last requests tell.

        Those that a deadline canceled raised nothing of the kind themselves.
        """
        if self._revoked is not None:
            raise self._revoked

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        """Return the model's answer to `messages`; cancelling the caller cancels the request."""
        fields: dict[str, Any] = {
            "messages": [message_to_json(message) for message in messages],
            **sampling_fields(sampling),
        }
        if tools:
            fields["tools"] = list(tools)
        num_images = sum(len(message.images) for message in messages)
        try:
            return await self.request(fields)
        except EndpointError as error:
            if num_images and error.status in _NOT_TAKEN:
                text = (
                    f"{error}; the request holds {num_images} picture{'s' * (num_images > 1)}, "
                    "which many models do not take: name one that does, or an environment of text "
                    "alone"
                )
                raise EndpointError(
                    text,
                    status=error.status,
                    answer=error.answer,
                    num_retries=error.num_retries,
                ) from None
            raise

    async def request(self, fields: Mapping[str, Any]) -> Completion:
        """Send a request whose chat API `fields` are kept as they are, except the model's name.

        Fields that this endpoint names differently, or does not take, are written accordingly.
        """
        body = {**fields, "model": await self.model(), **self._extra}
        where = without_passwords(self._chat_url)
        num_retries = 0
        num_answers = self._num_answers
        while True:
            dialect = self._dialect
            content = msgspec.json.encode(dialect.written(body))
            try:
                reply = await self._pool.request(
                    "POST",
                    self._chat_url,
                    content,
                    headers=self._headers,
                    limits=self._limits,
                    handling=Handling(
                        passes=self._may_pass,
                        trouble_in=partial(trouble_in, where=where),
                        on_cut=partial(self._note_cut, num_answers=num_answers),
                    ),
                )
                break
            except EndpointError as error:
                error.num_retries += num_retries
                if error.is_filtered:
                    self._answers()
                    return _filtered(error)
                learned = dialect.learned(error, self._optional)
                if learned is None:
                    # Another request may have been answered since this one began.
                    is_last = num_answers == self._num_answers
                    raise await self._refused(error, self._chat_url, is_last=is_last) from None
                # Other requests in flight may have learned something else in the meantime.
                self._dialect |= learned
                num_retries = error.num_retries + 1
        self._answers()
        num_retries += reply.num_retries
        try:
            completion = self._read(reply.content, where=where)
        except EndpointError as error:
            error.num_retries = num_retries
            raise
        return replace(completion, num_retries=num_retries)

    def _answers(self) -> None:
        """Record that a request was let in and dealt with."""
        self._num_answers += 1
        self._num_denied = 0
        self._revoked = None

    async def _refused(
        self, error: EndpointError, url: str, *, is_last: bool = True
    ) -> EndpointError:
        """Return `error`, as EndpointAccessError if every other request would be refused too.

        Once the endpoint has answered, only a bad key concerns every request: some endpoints use
        403 and 404 for the content of one. A 401 then may pass, or is that of one of several
        servers. A key that was revoked is denied several times, without an answer in between.
        `is_last`: whether no request has been answered since the refused one began.
        """
        if error.status not in (401, 403, 404) or (self._num_answers and error.status != 401):
            return error
        kind = EndpointAccessError
        if self._num_answers:
            if is_last:
                self._num_denied += 1 + error.num_retries
            if self._num_denied < MOST_DENIED:
                kind = EndpointError
        if error.status == 404:
            advice = await self._advice_on_model()
        else:
            advice = self._advice_on_key(error.status, times=1 + error.num_retries)
        return _told(kind, error, url, advice)

    def _may_pass(self, error: EndpointError) -> bool:
        """Return whether a refused request is sent again: a 401, unless the key was revoked."""
        return error.status == 401 and self._num_answers > 0 and self._num_denied < MOST_DENIED

    def _note_cut(self, error: EndpointError, *, num_answers: int) -> None:
        """Count the refusals of a request that is canceled before all of its tries are made.

        Deadlines may be shorter than the time for which requests are sent again: no request would
        ever be refused in the end. `num_answers`: those when the request began.
        """
        if error.status != 401 or num_answers != self._num_answers:
            return
        times = 1 + error.num_retries
        self._num_denied += times
        if self._num_denied >= MOST_DENIED:
            advice = self._advice_on_key(401, times=times)
            self._revoked = _told(EndpointAccessError, error, self._chat_url, advice)

    def _advice_on_key(self, status: int, *, times: int) -> str:
        value, variable = self._api_key
        held = f" in {variable}" if variable else ""
        if self._num_answers:
            key = f"the same API key{held}" if value else "no API key"
            tried = f" (tried {times} times)" if times > 1 else ""
            return (
                f"it has answered requests with {key} before{tried}: see whether access has "
                "expired or was revoked"
            )
        if not value:
            unset = f", because {variable} is not set" if variable else ""
            option = self.options.api_key_env
            return f"no API key was sent{unset}; name its environment variable with {option}"
        if status == 401:
            return f"the API key{held} was not accepted; put the right one there"
        return f"the API key{held} may not use the model {self._model or 'there'!r}"

    async def _advice_on_model(self) -> str:
        base_url = "check the base URL (it usually ends in /v1)"
        try:
            served = await self.list_models()
        except EndpointError:
            return f"{base_url} and the name of the model, {self._model!r}"
        if self._model in served:
            return base_url
        where = f"(served by {self._shown_url})"
        return str(unknown_name("model", self._model or "", served, where))


def _filtered(error: EndpointError) -> Completion:
    """Return the refusal of a content filter as the answer that other endpoints send for it."""
    return Completion(
        message=Message(role="assistant", content=""),
        finish_reason="content_filter",
        num_retries=error.num_retries,
    )


_Kind = TypeVar("_Kind", bound=EndpointError)


def _told(kind: type[_Kind], error: EndpointError, url: str, advice: str) -> _Kind:
    """Return the refusal `error` of `url` as an error of `kind` that says what to do."""
    shown = without_passwords(url)
    text = f"{shown} answered {error.status}: {error.answer or 'nothing'}; {advice}"
    return kind(text, status=error.status, answer=error.answer, num_retries=error.num_retries)


class _ChatPolicy:
    def __init__(self, client: ChatClient, seed: int | None) -> None:
        self._client = client
        self._seeds = TurnSeeds(seed, num_bits=ENDPOINT_BITS)
        self._recorder = ChainRecorder()

    @property
    def endpoint(self) -> ChatEndpoint:
        return self._client.endpoint

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        sampling = self._seeds.seeded(sampling)
        completion = await self._client.complete(messages, sampling, tools=tools)
        alone = completion.tokens
        if alone is None:
            return completion
        tokens = self._recorder.record(
            alone.prompt_ids, alone.completion_ids, alone.logprobs, temperature=sampling.temperature
        )
        return replace(completion, tokens=tokens)


_OLD, _NEW = "max_tokens", "max_completion_tokens"
_REFUSALS = (400, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The field names and settings that one endpoint accepts for one model.

    Some endpoints refuse `max_tokens` and want `max_completion_tokens`, and some models take no
    temperature. The first refusal says so; every later request is then written accordingly.
    """

    is_new_name: bool = False
    """Whether the token limit is named `max_completion_tokens`."""
    left_out: frozenset[str] = frozenset()
    """Fields that the endpoint does not accept."""

    def written(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request in this dialect."""
        kept = {name: value for name, value in fields.items() if name not in self.left_out}
        if self.is_new_name and _OLD in kept:
            kept.setdefault(_NEW, kept[_OLD])
            del kept[_OLD]
        return kept

    def learned(self, refusal: EndpointError, optional: Collection[str]) -> "Dialect | None":
        """Return the dialect that a refusal calls for; None if it calls for no other one.

        Only fields in `optional` may be left out. Each refusal adds to the dialect or ends the
        request, so that a request is repeated at most once for the name and each optional field.
        """
        # vLLM names both forms of the limit where the prompt is too long for any limit.
        if refusal.status not in _REFUSALS or says_too_long(refusal.answer):
            return None
        if not self.is_new_name and _NEW in refusal.answer:
            return replace(self, is_new_name=True)
        named = {name for name in optional if name in refusal.answer} - self.left_out
        return replace(self, left_out=self.left_out | named) if named else None

    def __or__(self, other: "Dialect") -> "Dialect":
        return Dialect(
            is_new_name=self.is_new_name or other.is_new_name,
            left_out=self.left_out | other.left_out,
        )


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request; settings that are not set are left to the endpoint.

    Settings without a value for "not set" are left out while they change nothing.
    """
    fields: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    if sampling.temperature is not None:
        fields["temperature"] = sampling.temperature
    if sampling.top_p not in (None, 1.0):
        fields["top_p"] = sampling.top_p
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop and sampling.include_stop_str_in_output:
        fields["include_stop_str_in_output"] = True
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.top_k is not None and sampling.top_k > 0:
        fields["top_k"] = sampling.top_k
    if sampling.min_p is not None and sampling.min_p > 0.0:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty not in (None, 1.0):
        fields["repetition_penalty"] = sampling.repetition_penalty
    return {**fields, **sampling.extra}
