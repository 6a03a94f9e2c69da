"""Rollouts of `shell-agent` with compactions and sub-agents, through a real gateway, in tokens."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest
from scripted_pool import ScriptedPool, make_renderer

from telescope_core.gateway import Gateway
from telescope_core.harnesses.compaction_program import DELEGATE, SHELL, SUMMARIZE, Agents
from telescope_core.types import Rollout, Sampling
from telescope_train.inference.generation import Generation
from telescope_train.inference.policy import TokenPolicySource

SAMPLING = Sampling(max_tokens=400, temperature=0.9)


def call(separators: tuple[str, str], name: str, **arguments: str) -> str:
    """Return the text of a turn that calls a tool."""
    asked = json.dumps({"name": name, "arguments": arguments}, separators=separators)
    return f"<tool_call>\n{asked}\n</tool_call>"


class CountedPool(ScriptedPool):
    """Gives each sampled token of a rollout a log-prob of its own, and keeps what it answered."""

    def __init__(self, renderer, reply: Callable[[str], str]) -> None:
        super().__init__(renderer, reply)
        self.answered: list[tuple[tuple[int, ...], Generation]] = []
        self._numbers = count(1)

    async def generate(self, request):
        found = await super().generate(request)
        logprobs = tuple(-next(self._numbers) / 4096 for _ in found.token_ids)
        found = Generation(
            token_ids=found.token_ids,
            logprobs=logprobs,
            finish_reason=found.finish_reason,
            spans=found.spans,
        )
        self.answered.append((tuple(request.prompt_ids), found))
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """Return what ids stand for."""
        return self._renderer._tokenizer.decode(list(token_ids))


@dataclass
class Script:
    """What the model says: the main agent calls tools, and the sub-agents run one command each."""

    commands: Sequence[str]
    """What the main agent runs; one that begins with `delegate ` goes to a sub-agent."""
    num_summaries: int = 0
    delegated: list[str] = field(default_factory=list)
    separators: tuple[str, str] = (", ", ": ")
    _at: int = 0

    def __call__(self, prompt: str) -> str:
        if SUMMARIZE in prompt.rpartition("<|user|>")[2]:
            self.num_summaries += 1
            return f"so far {self.num_summaries} times"
        if "You are a sub-agent" in prompt:
            is_done = "<|tool|>" in prompt.rpartition("<|user|>")[2]
            return (
                "the part is done"
                if is_done
                else call(self.separators, "shell", command="echo part")
            )
        if self._at == len(self.commands):
            return "all is done"
        command = self.commands[self._at]
        self._at += 1
        if command.startswith("delegate "):
            self.delegated.append(command)
            return call(self.separators, "delegate", task=command.removeprefix("delegate "))
        return "<think>hm</think>" * (self._at % 2) + call(
            self.separators, "shell", command=command
        )


@asynccontextmanager
async def gateway_of():
    """Yield a gateway."""
    made = Gateway(model="policy")
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def play(
    commands: Sequence[str],
    *,
    keep_thinking: bool = True,
    spells_calls_its_own_way: bool = False,
    **options,
) -> tuple[Rollout, CountedPool, Script]:
    """Return a rollout of the program, what the server was asked, and what it said."""
    renderer, script = make_renderer(keep_thinking=keep_thinking), Script(commands)
    if spells_calls_its_own_way:
        script.separators = (",", ":")
    pool = CountedPool(renderer, script)
    async with gateway_of() as gateway:
        source = TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway)
        policy = source.policy("0.0/0", SAMPLING)
        assert policy.endpoint is not None
        asked = {
            "model": policy.endpoint.model,
            "max_turns": 60,
            "context_strategy": "none",
            "max_context_tokens": 1500,
            "keep_turns": 1,
            "tool_timeout_s": 60.0,
            **options,
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("OPENAI_BASE_URL", policy.endpoint.base_url)
            patched.setenv("OPENAI_API_KEY", policy.endpoint.api_key)
            answer = await asyncio.to_thread(
                Agents(asked).answer, "be brief", "find the number", [SHELL, DELEGATE]
            )
        assert answer == "all is done"
        rollout = Rollout(
            environment="agent",
            example_id="e",
            group_id="0.0",
            index=0,
            turns=tuple(policy.turns),
            conversations=policy.recorder.conversations,
        )
        policy.close()
    return rollout, pool, script


def three_compactions_and_two_sub_agents(seed: int, *, size: int = 300) -> list[str]:
    """Return what the main agent does; its commands print about `size` characters each."""
    chance = random.Random(seed)
    prints = [
        f"printf '%0{size + chance.randrange(30)}d' {chance.randrange(1000)}" for _ in range(5)
    ]
    return [prints[0], "delegate part one", *prints[1:4], "delegate part two", prints[4]]
