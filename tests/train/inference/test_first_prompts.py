"""Prompts that were rendered ahead are found ready when a rollout asks for the first time."""

import threading
from collections.abc import Mapping

import pytest
from tests.train.chat.templates.families import BY_NAME
from tests.train.inference.test_token_policy import RecordingPool
from tests.train.rollouts.samplers import EventList
from tests.train.rollouts.test_held_out import OneList, config_of, records_of

from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.types import JsonValue, Message, Sampling
from telescope_train.chat.renderer import LONG_CHARACTERS, Renderer
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.mix import make_sampler, training_environments

ADD: dict[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the template has rendered since the list was cleared: the text of the last message."""
    texts: list[str] = []
    text = Renderer.text

    def noted(self: Renderer, messages, **how) -> str:
        texts.append(messages[-1].content)
        return text(self, messages, **how)

    monkeypatch.setattr(Renderer, "text", noted)
    return texts


def user(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


async def test_what_was_made_ready_is_not_rendered_again(rendered: list[str]) -> None:
    renderer = BY_NAME["Qwen2.5"].renderer()
    answer = [*renderer.encode("fine"), *renderer.stop_token_ids]
    pool = RecordingPool([answer] * 3)
    source = TokenPolicySource(pool, renderer, max_model_len=None)
    asks = 0

    async def ask(content: str, environment_tools: list[Mapping[str, JsonValue]]) -> list[str]:
        """Return what is rendered before the servers are asked."""
        nonlocal asks
        asks += 1
        rendered.clear()
        policy = source.policy(f"{asks}.0/0", Sampling(max_tokens=8))
        before = len(pool.prompts)
        generate = pool.generate
        seen: list[str] = []

        async def noting(*arguments, **options):
            seen.extend(rendered)
            return await generate(*arguments, **options)

        pool.generate = noting  # type: ignore[method-assign]
        await policy.complete(user(content), Sampling(max_tokens=8), tools=environment_tools)
        pool.generate = generate  # type: ignore[method-assign]
        assert len(pool.prompts) == before + 1
        return seen

    await source.prepare("sums", user("one"))
    assert rendered.count("one") == 1
    # It offers a tool, which nobody knew: from now on prompts are made ready with it.
    assert await ask("one", [ADD]) == ["one"]
    rendered.clear()
    await source.prepare("sums", user("two"))
    assert rendered == ["two"]
    assert await ask("two", [ADD]) == []
    assert await ask("three", [ADD]) == ["three"], "nobody made it ready"


@pytest.mark.parametrize("is_prepared", [True, False])
async def test_a_long_first_prompt_is_encoded_beside_the_event_loop(is_prepared: bool) -> None:
    renderer = BY_NAME["Qwen2.5"].renderer()
    plain, threads = renderer._encoder._tokenizer, dict[int, set[bool]]()

    def tokenize(texts, **how):
        for one in texts:
            is_here = threading.current_thread() is threading.main_thread()
            threads.setdefault(len(one) >= LONG_CHARACTERS, set()).add(is_here)
        return plain(texts, **how)

    renderer._encoder._tokenizer = tokenize
    answer = [*renderer.encode("fine"), *renderer.stop_token_ids]
    pool = RecordingPool([answer] * 2)
    source = TokenPolicySource(pool, renderer, max_model_len=None)
    asked = user("long " * (LONG_CHARACTERS // 4))
    if is_prepared:
        await source.prepare("sums", asked)
    policy = source.policy("g/0", Sampling(max_tokens=8))
    said = await policy.complete(asked, Sampling(max_tokens=8))
    assert said.message.content == "fine"
    assert threads[True] == {False}
    assert list(pool.prompts[0]) == list(BY_NAME["Qwen2.5"].renderer().prompt(asked).ids)


async def test_the_sampler_makes_the_prompts_of_its_draws_ready(tmp_path) -> None:
    config = config_of(tmp_path, separate=False)
    client = InProcessEnvironment(OneList(), name="toy:Toy")
    mix = await training_environments(
        config, {"toy:Toy": client}, {"toy:Toy": client}, records_of(config)
    )
    ready: list[tuple[str, str]] = []

    async def prepare(environment, messages):
        ready.append((environment, messages[-1].content))

    sampler = make_sampler(
        config,
        mix,
        ScriptedClient(["yes"]),
        Attempts.from_config(config, EventList(), num_servers=1),
        prepare=prepare,
    )
    sampler.advance(0)
    await sampler.take(0)
    await sampler.close()
    await client.close()
    assert ready
    assert set(ready) == {("toy:Toy", "p")}
