"""An agent whose context is compacted, and its sub-agents: what was sampled is trained on once."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.asking import ask

sys.path.insert(0, str(Path(__file__).parent))
from agent_trees import (
    SAMPLING,
    CountedPool,
    Script,
    gateway_of,
    play,
    three_compactions_and_two_sub_agents,
)
from scripted_pool import make_renderer

from telescope_core.base.chains import chains_of
from telescope_core.gateway import RecordedEnvironment
from telescope_core.harnesses import AgentConfig
from telescope_core.in_process import InProcessEnvironment
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.policy import TokenPolicySource

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "compact-the-context.md"


def require_as_sampled(samples, pool) -> None:
    """Every sampled token is trained on once, behind exactly the tokens that the server saw."""
    trained = np.concatenate([one.behavior_logprobs[one.mask] for one in samples])
    sampled = np.concatenate([found.logprobs for _, found in pool.answered]).astype(np.float32)
    assert len(set(sampled)) == len(sampled)
    assert sorted(trained) == sorted(sampled)
    for prompt_ids, found in pool.answered:
        whole = [*prompt_ids, *found.token_ids]
        there = slice(len(prompt_ids), len(whole))
        assert any(
            one.token_ids[: len(whole)].tolist() == whole
            and one.behavior_logprobs[there].tolist() == np.float32(found.logprobs).tolist()
            for one in samples
        )


@pytest.mark.parametrize("keep_thinking", [True, False])
@pytest.mark.parametrize("strategy", ["none", "summarize", "drop_tool_results", "sliding_window"])
async def test_each_strategy_trains_each_sampled_token_once(strategy, keep_thinking):
    rollout, pool, _ = await play(
        three_compactions_and_two_sub_agents(0),
        context_strategy=strategy,
        keep_thinking=keep_thinking,
    )
    samples = samples_from_rollout(rollout, 1.0, 1.0)
    require_as_sampled(samples, pool)
    assert len(samples) == len(chains_of(turn.completion.tokens for turn in rollout.turns))
    assert len({turn.agent for turn in rollout.turns}) == 2
    assert all(one.turns for one in samples)


@pytest.mark.parametrize("strategy", ["none", "drop_tool_results", "sliding_window"])
async def test_turns_that_stay_are_the_tokens_that_were_sampled(strategy):
    """The model spells its calls otherwise than the template, which would show in a prompt."""
    _, pool, _ = await play(
        three_compactions_and_two_sub_agents(0),
        context_strategy=strategy,
        max_context_tokens=1100,
        keep_turns=2,
        spells_calls_its_own_way=True,
    )
    calls = [pool.text(prompt_ids).count('{"name":"') for prompt_ids, _ in pool.answered]
    assert max(calls) >= 2
    for prompt_ids, _ in pool.answered:
        assert '{"name": "shell", "arguments"' not in pool.text(prompt_ids)
        assert '{"name": "delegate", "arguments"' not in pool.text(prompt_ids)


@pytest.mark.slow
async def test_the_environment_of_the_page_is_played_in_a_sandbox_and_trained_exactly():
    page = PAGE.read_text()
    source = re.search(r'title="logs.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    options = re.search(r"--env.harness_options '(.*)'", page)
    assert source is not None
    assert options is not None
    namespace: dict = {"__name__": "logs"}
    exec(compile(source[1], str(PAGE), "exec"), namespace)
    asked = json.loads(options[1]) | {"max_context_tokens": 1500, "sub_agents": True}
    config = AgentConfig(harness="shell-agent", harness_options=asked, max_turns=40)
    client = RecordedEnvironment(InProcessEnvironment(namespace["Logs"](config), name="logs"))
    commands = [f"cat log-{number}" for number in range(3)]
    found = "grep -h ERROR log-* | sed 's/.*ERROR //' > code; cat code"
    renderer = make_renderer()
    pool = CountedPool(renderer, script := Script([*commands, "delegate look", found]))
    async with gateway_of() as gateway:
        source_ = TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway)
        policy = source_.policy("0.0/0", SAMPLING)
        rollout = await client.play(ask(sampling=SAMPLING, deadline_s=300.0), policy)
    await client.close()
    wrote = [note.value for note in rollout.info]
    assert (rollout.reward, rollout.completion_text) == (1.0, "all is done"), (rollout.error, wrote)
    assert (script.num_summaries, script.delegated) == (2, ["delegate look"])
    samples = samples_from_rollout(rollout, 1.0, 1.0)
    assert len(samples) == 4
    require_as_sampled(samples, pool)
