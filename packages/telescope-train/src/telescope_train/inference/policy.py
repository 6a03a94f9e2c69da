"""The token-exact policy: sampled text is never converted back to tokens.

`conversations` decides which sampled ids a request may reuse. Every answer is recorded here, in
chains of tokens, whether the environment asked for it or a program that the environment runs,
through the gateway.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from telescope_core.base.chains import ChainRecorder, SampledTokens
from telescope_core.base.errors import (
    ContextLengthError,
    EndpointError,
    EndpointLostError,
    TemplateLossError,
)
from telescope_core.base.seeds import TurnSeeds, derived_seed
from telescope_core.base.types import Completion, JsonValue, Message, Sampling, Tools, Turn
from telescope_core.gateway import Gateway, RecordingPolicy
from telescope_core.gateway.request import OLDER_VERSION, ChatRequest
from telescope_train.chat.conversations import Conversations
from telescope_train.chat.renderer import Prompt, Renderer
from telescope_train.inference.generation import Generation, Request, until_stop
from telescope_train.inference.pool import RolloutServers, ServerPool

MOST_REMEMBERED = 4096
"""Most prepared prompts that have not been used yet."""
_LOGGER = logging.getLogger(__name__)


class FirstPrompts:
    """Renders and tokenizes first prompts before their rollouts are played.

    The tools of an environment become known with the first request of one of its rollouts: none
    declares them before, and some get them from servers that are connected during play. Prompts
    are prepared with those that their environment offered last.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tools: dict[str, Tools] = {}
        self._environments: OrderedDict[tuple[Message, ...], str] = OrderedDict()

    async def prepare(self, environment: str, messages: Sequence[Message]) -> None:
        """Prepare the most likely first prompt of a rollout of `environment`."""
        key = tuple(messages)
        self._environments[key] = environment
        if len(self._environments) > MOST_REMEMBERED:
            self._environments.popitem(last=False)
        tools = self._tools.get(environment, ())
        await self._renderer.prepare(key, tools=tools)
        self._renderer.prompt(key, tools=tools)

    def is_asked(self, messages: tuple[Message, ...], tools: Tools) -> None:
        """Record the tools with which a rollout begins; later prompts are prepared with them."""
        environment = self._environments.pop(messages, None)
        if environment is not None:
            self._tools[environment] = tools


class TokenPolicySource:
    """Gives each rollout a token-exact policy over the server pool."""

    def __init__(
        self,
        pool: ServerPool,
        renderer: Renderer,
        *,
        max_model_len: int | None,
        interleaved: bool = True,
        gateway: Gateway | None = None,
        servers_of: Callable[[str], RolloutServers] | None = None,
        older_of: Callable[[str], RolloutServers] | None = None,
    ) -> None:
        """Without `interleaved`, each prompt is tokenized again, without reusing sampled ids.

        `max_model_len`: tokens of prompt and answer together; None = no limit is checked.
        `servers_of`: gives what a rollout asks in place of `pool`, by the rollout's id.
        `older_of`: gives what an older version in its place asks, by the id of the group; None =
        there are no older versions.
        """
        self._pool = pool
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._interleaved = interleaved
        self._gateway = gateway
        self._servers_of = servers_of
        self._older_of = older_of
        self._first_prompts = FirstPrompts(renderer)

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "TokenPolicy":
        """Return the policy of one rollout.

        It has an endpoint only if there is a gateway and `sampling` is given.
        """
        # The id of the group, whose rollouts share a prompt and therefore a server.
        group_id = rollout_id.rpartition("/")[0]
        seed = None if sampling is None else sampling.seed
        of_group = partial(
            TokenPolicy,
            renderer=self._renderer,
            group_id=group_id,
            max_model_len=self._max_model_len,
            interleaved=self._interleaved,
        )
        servers = self._pool if self._servers_of is None else self._servers_of(rollout_id)
        policy = of_group(servers, seed=seed, first_prompts=self._first_prompts)
        if self._gateway is not None and sampling is not None:
            if self._older_of is not None:
                # It draws other chances than the policy does in the same turn.
                other_seed = None if seed is None else derived_seed(seed, OLDER_VERSION)
                policy.older = of_group(self._older_of(group_id), seed=other_seed)
            # Only the policy holds its session; the gateway refers to it weakly. A policy that is
            # dropped without `close` therefore takes its endpoint with it.
            policy.session = self._gateway.open(
                policy, sampling, has_older=policy.older is not None
            )
        return policy

    async def prepare(self, environment: str, messages: Sequence[Message]) -> None:
        """Render and tokenize a first prompt ahead of its rollouts, which then find it."""
        await self._first_prompts.prepare(environment, messages)

    async def close(self) -> None:
        """Do nothing: the pool and the gateway are closed by whoever opened them."""


class TokenPolicy(RecordingPolicy):
    """One rollout's policy."""

    def __init__(
        self,
        pool: RolloutServers,
        renderer: Renderer,
        group_id: str,
        max_model_len: int | None,
        *,
        interleaved: bool = True,
        seed: int | None = None,
        first_prompts: FirstPrompts | None = None,
    ) -> None:
        """`seed`: that of the rollout, from which the seed of each request is derived.

        `first_prompts` hears what it is asked first; None = nobody does.
        """
        super().__init__()
        self._pool = pool
        self._renderer = renderer
        self._group_id = group_id
        self._max_model_len = max_model_len
        self._conversations = Conversations(renderer) if interleaved else None
        self._chains = ChainRecorder()
        self._seeds = TurnSeeds(seed)
        self._first_prompts = first_prompts
        self.older: TokenPolicy | None = None
        """An older version, which plays in the same rollout and is not trained on."""

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Answer `messages`, token-exactly."""
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        asked = tuple(messages)
        if self._first_prompts is not None and not self.recorder.was_asked:
            self._first_prompts.is_asked(asked, tools)
        self.recorder.was_asked = True
        # An agent may send several requests at the same time. None of them sees the answer to
        # another that is still being sampled, and two that go on from the same one are both exact.
        try:
            if not self.turns:
                # Later prompts add little to the tokens of a turn before them.
                await self._renderer.prepare(asked, tools=tools)
            prompt = self._prompt_for(asked, tools)
            sampling = self._seeds.seeded(self._fitted(sampling, len(prompt.ids)))
            generation = await self._pool.generate(
                Request(
                    prompt_ids=prompt.ids,
                    sampling=sampling,
                    stop_token_ids=self._renderer.stop_token_ids,
                    group_id=self._group_id,
                    # Later turns go first: a rollout that is nearly done frees slot and cache.
                    priority=-len(self.turns),
                )
            )
            generation = until_stop(generation, sampling.stop, self._renderer.decode)
            said = self._renderer.parse(generation.token_ids, tools=tools, prompt=prompt)
        except (EndpointError, TemplateLossError, ContextLengthError) as error:
            self.recorder.failed(asked, error)
            raise
        except asyncio.CancelledError:
            if self._pool.is_down:
                # A deadline that passed while no server was there is no limit of the rollout's.
                gone = EndpointLostError("no inference server was there when the deadline came")
                self.recorder.failed(asked, gone)
            raise
        # Nothing is awaited from here on, so conversations, chains and `turns` of requests that
        # overlap stay in step, in the order in which their answers ended.
        if not sampling.include_stop_str_in_output:
            said = replace(said, content=before_stop(said.content, sampling.stop))
        tokens = self._chains.record(
            prompt.ids,
            generation.token_ids,
            generation.logprobs,
            temperature=sampling.temperature,
            routes=generation.routes,
        )
        if self._conversations is not None:
            self._conversations.add(prompt, said, tokens, tools=tools)
        completion = _completion(tokens, generation, said)
        if sampling.stop:
            written = self._renderer.decode(generation.token_ids)
            completion = replace(completion, stop_text=first_stop(written, sampling.stop))
        _LOGGER.debug(
            "request of %s: %d prompt tokens, %d sampled in %.3f s by weights %d to %d, ended by "
            "%s; turn %d of its rollout",
            *(self._group_id, tokens.prompt_end, tokens.num_completion_ids),
            *(clock.time() - started_s, completion.oldest_version, completion.newest_version),
            *(completion.finish_reason, len(self.turns) + 1),
        )
        turn = Turn(
            completion=completion,
            started_s=started_s,
            ended_s=clock.time(),
            temperature=sampling.temperature,
        )
        self.recorder.answered(asked, turn, tools)
        return completion

    async def answer(self, request: ChatRequest) -> Completion:
        """Answer a program, and record its conversation as well as the tokens."""
        if request.model == OLDER_VERSION:
            assert self.older is not None, "the session says whether there is one"
            # With a record of its own, which no rollout has: its tokens are not to be trained on.
            sampling = replace(request.sampling, seed=self.older._seeds.seed)
            return await self.older.complete(request.messages, sampling, tools=request.tools)
        completion = await self.complete(request.messages, request.sampling, tools=request.tools)
        self.recorder.heard(request.messages, completion)
        return completion

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`, including sampled ones."""
        return len(self._prompt_for(tuple(request.messages), request.tools).ids)

    def _prompt_for(
        self, messages: tuple[Message, ...], tools: Sequence[dict[str, JsonValue]]
    ) -> Prompt:
        if self._conversations is None:
            return self._renderer.prompt(messages, tools=tools)
        return self._conversations.prompt_for(messages, tools=tools)

    def _fitted(self, sampling: Sampling, num_prompt_tokens: int) -> Sampling:
        """Return `sampling` with `max_tokens` limited to the room that is left in the context.

        The first turn must fit without a cut. If it does not, the settings are wrong.
        """
        limit = self._max_model_len
        if limit is None or num_prompt_tokens + sampling.max_tokens <= limit:
            return sampling
        if self.turns and num_prompt_tokens < limit:
            return replace(sampling, max_tokens=limit - num_prompt_tokens)
        advice = "send a shorter history" if self.turns else "shorten the prompt"
        if num_prompt_tokens < limit:
            advice = "lower max_tokens"
        # Some libraries know by the first words that they have to shorten the history.
        raise ContextLengthError(
            f"this model's maximum context length is {limit} tokens (max_model_len), but a prompt "
            f"of {num_prompt_tokens} tokens and max_tokens = {sampling.max_tokens} need "
            f"{num_prompt_tokens + sampling.max_tokens}; {advice} or raise max_model_len"
        )


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` before the first of the stop texts, which chat endpoints leave out."""
    return text.partition(first)[0] if (first := first_stop(text, stop)) else text


def first_stop(text: str, stop: Sequence[str]) -> str:
    """Return the stop text that comes first in `text`; empty if there is none."""
    return min((one for one in stop if one in text), key=text.find, default="")


def _completion(tokens: SampledTokens, generation: Generation, said: Message) -> Completion:
    is_call = bool(said.tool_calls) and generation.finish_reason == "stop"
    return Completion(
        message=said,
        finish_reason="tool_calls" if is_call else generation.finish_reason,
        tokens=tokens,
        oldest_version=generation.oldest_version,
        newest_version=generation.newest_version,
        spans=generation.spans,
        num_prompt_tokens=tokens.prompt_end,
        num_completion_tokens=tokens.num_completion_ids,
    )
