"""An environment that asks for its own words, an endpoint that says them, and the command."""

import pytest
from aiohttp import web

from telescope_cli.main import main

ENVIRONMENT = '''
from typing import Literal
from telescope_core import EnvironmentConfig, Example, ListSource
from telescope_core import SingleTurnEnvironment, metric, reward


class Inner(EnvironmentConfig):
    depth: int = 1


class Echo(SingleTurnEnvironment):
    """Say it again."""

    class Config(EnvironmentConfig):
        size: int = 64
        style: Literal["plain", "loud"] = "plain"
        words: tuple[str, ...] = ()
        inner: Inner = Inner()

    def examples(self, split):
        size = self.config.size
        return ListSource([Example(id=f"{split}-{i}", prompt=str(i)) for i in range(size)])

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.prompt)

    @metric(low=0, lower_is_better=True)
    def words_said(self, rollout, example):
        return len(rollout.completion_text.split())


class Loud(Echo):
    """Say it again, as another environment, which prints."""

    @reward
    def correct(self, rollout, example):
        print("graded")
        return super().correct(rollout, example)


class Sevens(Echo):
    """Ask for the same number again and again."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-{i}", prompt="7") for i in range(8)])
'''


BROKEN = web.AppKey("broken", bool)
NAMES = web.AppKey("names", list)


async def answer(request):
    body = await request.json()
    if body["model"] not in request.app[NAMES]:
        return web.json_response({"error": "no such model"}, status=404)
    text = body["messages"][-1]["content"]
    if text == "7" and request.app[BROKEN]:
        return web.json_response({"error": "cannot"}, status=400)
    said = "no" if text.isdecimal() and int(text) % 2 else text
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return web.json_response({"choices": [choice], "usage": usage})


async def models(request):
    return web.json_response({"data": [{"id": name} for name in request.app[NAMES]]})


def telescope(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, arguments)])
    return ended.value.code or 0
