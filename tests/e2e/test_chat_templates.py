"""A real server's own record of the prompt ids of a conversation equals ours, turn by turn."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.ports import free_port
from tests.train.chat.templates.families import (
    BY_NAME,
    CHATML_MARKS,
    FIXTURES,
    LLAMA_MARKS,
    QWEN_PLAIN,
    Family,
)
from tests.train.chat.templates.play import SCENARIOS, TOOLS, play
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from telescope_core.base.messages import message_to_json
from telescope_core.types import Message
from telescope_train.inference.server import SERVED_MODEL_NAME, ServerSettings, running

pytestmark = pytest.mark.engine

MARKS = [*CHATML_MARKS, *LLAMA_MARKS, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>"]


def with_all_marks(name: str) -> Family:
    """The family over one tokenizer that has the tokens of both."""
    return replace(
        BY_NAME[name],
        name=f"{name}, one server",
        special=MARKS,
        plain=QWEN_PLAIN,
        bos="<|begin_of_text|>",
        eos="<|im_end|>",
        pad="<|pad|>",
    )


CASES = [
    (with_all_marks("Qwen3, thinking"), "thinking tools"),
    (with_all_marks("Llama 3.1"), "tools"),
]


class TakesTemplates(ServerSettings):
    """A server that renders with the template of the request."""

    def arguments(self) -> list[str]:
        return [*ServerSettings.arguments(self), "--trust-request-chat-template"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand weights over the tokenizer of both families."""
    folder = tmp_path_factory.mktemp("models") / "both"
    tokenizer = CASES[0][0].tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen3ForCausalLM(config)
    network.generation_config = GenerationConfig(**ends)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = TakesTemplates(
        model_path=str(model),
        port=free_port(),
        log_path=tmp_path_factory.mktemp("logs") / "inference-0.log",
        max_model_len=2048,
        max_num_seqs=4,
    )
    with running(settings, deadline_s=180):
        yield settings.base_url


async def recorded(base_url: str, family: Family, messages: tuple[Message, ...]) -> list[int]:
    """The ids that the server says it conditioned on."""
    body: dict[str, Any] = {
        "model": SERVED_MODEL_NAME,
        "messages": [message_to_json(message) for message in messages],
        "tools": TOOLS,
        "tool_choice": "none",
        "chat_template": (FIXTURES / f"{family.template}.jinja").read_text(),
        "max_tokens": 1,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/v1/chat/completions", json=body) as reply,
    ):
        text = await reply.text()
        assert reply.status == 200, text
        return json.loads(text)["prompt_token_ids"]


@pytest.mark.parametrize(("family", "scenario"), CASES, ids=lambda case: getattr(case, "name", ""))
async def test_the_servers_own_record_of_each_prompt_is_ours(server, family, scenario):
    played = play(family, SCENARIOS[scenario])
    assert len(played.prompts) == 3
    for prompt in played.prompts:
        assert await recorded(server, family, prompt.messages) == list(prompt.token_ids)
