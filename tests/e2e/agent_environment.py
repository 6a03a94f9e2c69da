"""An environment whose rollouts are played by agents of pydantic-ai, over a chat endpoint."""

import asyncio

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from telescope_core import Environment, Episode, Example, Message, StopReason, reward
from telescope_core.examples import GeneratedSource


class AskedTwice(Environment):
    """An agent answers, is asked again with its history, and has a colder helper beside it."""

    def examples(self, split):
        def make(random, index):
            return Example(id=f"{split}-{index}", prompt=f"{random.randrange(100)}+1=")

        return GeneratedSource(make, seed=f"asked-twice/{split}")

    async def play(self, episode: Episode) -> StopReason:
        endpoint = episode.endpoint
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        ) as client:
            model = OpenAIChatModel(endpoint.model, provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, retries=5)
            helper = Agent(
                model, retries=5, system_prompt="help", model_settings={"temperature": 0.7}
            )
            first, helped = await asyncio.gather(
                agent.run(episode.example.prompt), helper.run(episode.example.prompt)
            )
            second = await agent.run("again", message_history=first.all_messages())
        episode.add(Message(role="assistant", content=f"{second.output} {helped.output}"))
        return StopReason.COMPLETED

    @reward
    def checksum(self, rollout, example):
        """Tells any two answers apart, so that each group teaches something."""
        return sum(map(ord, rollout.completion_text)) % 1009 / 1009
