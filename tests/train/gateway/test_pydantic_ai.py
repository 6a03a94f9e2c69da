"""An agent of pydantic-ai, unmodified, over the gateway: tools, streams, its own history."""

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from test_anthropic_client import client_of as anthropic_client_of
from test_openai_client import TWO_CALLS, as_rollout, client_of

from telescope_train.batches.samples import samples_from_rollout

pytestmark = pytest.mark.slow


def chat(client) -> OpenAIChatModel:
    return OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))


def responses(client) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("policy", provider=OpenAIProvider(openai_client=client))


def messages(client) -> AnthropicModel:
    return AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))


def agent_of(client, model=chat, **options) -> Agent:
    agent = Agent(model(client), **options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    return agent


def answer(prompt: str) -> str:
    return "3 and 7" if "<|tool|>" in prompt else f"<think>both at once</think>{TWO_CALLS}"


@pytest.mark.parametrize("model", [chat, responses, messages])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_run_with_parallel_calls_is_one_sample(serve, is_streamed, model):
    rollout = serve(answer, keep_thinking=True)
    connect = anthropic_client_of if model is messages else client_of
    async with connect(rollout) as client:
        agent = agent_of(client, model, system_prompt="be brief")
        if is_streamed:
            async with agent.run_stream("1+2 and 3+4?") as run:
                output = await run.get_output()
        else:
            output = (await agent.run("1+2 and 3+4?")).output
    assert output == "3 and 7"
    assert len(rollout.policy.turns) == 2
    assert "be brief" in rollout.renderer.decode(rollout.pool.prompts[1])
    samples = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert len(samples) == 1
    assert int(samples[0].mask.sum()) == sum(
        len(turn.completion.completion_ids) for turn in rollout.policy.turns
    )


async def test_a_history_that_is_carried_on_continues_its_sample(serve):
    rollout = serve(lambda prompt: "yes" if "sure?" in prompt else answer(prompt))
    async with client_of(rollout) as client:
        agent = agent_of(client)
        first = await agent.run("1+2 and 3+4?")
        second = await agent.run("sure?", message_history=first.all_messages())
    assert second.output == "yes"
    assert sum(isinstance(one, ModelResponse) for one in second.all_messages()) == 3
    assert len(samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)) == 1
