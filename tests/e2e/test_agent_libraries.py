"""Agents of common libraries, unmodified, for three turns with tools: in training and in evals.

The libraries live in a virtual environment of their own, as those of installed environments do.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_core.chat.client import ChatClient
from telescope_core.gateway import Gateway, forwarding
from telescope_core.types import ChatEndpoint, Rollout, Sampling
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.policy import TokenPolicySource

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "gateway"))
from scripted_pool import ScriptedPool, make_renderer

pytestmark = pytest.mark.engine

PROGRAMS = Path(__file__).parent / "agents" / "programs.py"
REQUIREMENTS = PROGRAMS.with_name("requirements.txt")
MORE_REQUIREMENTS = PROGRAMS.with_name("more_requirements.txt")
NOTHING_ELSEWHERE = {
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
"""What keeps the libraries from asking for anything outside this machine."""
SAMPLING = Sampling(max_tokens=400, temperature=0.9)
NUM_SAMPLES = {
    "litellm": 1,
    "pydantic_ai": 1,
    # These send turns back without their thinking, and the last one as other messages.
    "langgraph": 3,
    "openai_agents": 3,
    "smolagents": 3,
}
"""Library -> training samples of a rollout of three turns with thinking."""
MORE_SAMPLES = {
    "adk": 1,
    "agent_framework": 3,
    "agent_framework_responses": 1,
    "agentscope": 3,
    "agno": 3,
    "autogen": 3,
    "haystack": 3,
    "langchain": 3,
    "llama_index": 3,
    "strands": 3,
}
"""The same of libraries that are tried less often."""


def python_with(requirements: Path) -> Path:
    """Return an interpreter with these packages, which is made once for each set of versions."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    own = Path(sys.prefix)
    place, python = own / f"agents-{digest}", own / f"agents-{digest}" / "bin" / "python"
    with (own / "agents.lock").open("w") as lock:
        # Two sessions at once would write into the same folder.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            uv = [sys.executable, "-m", "uv"]
            made = [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)]
            subprocess.run(made, check=True, timeout=120)
            installed = [*uv, "pip", "install", "--quiet", "--python", str(python)]
            subprocess.run([*installed, "-r", str(requirements)], check=True, timeout=600)
            (place / "complete").touch()
    return python


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def model_of(library: str):
    """Return a model that thinks, adds twice with the tool, and answers."""
    answer = call("final_answer", answer="10") if library == "smolagents" else "10"
    turns = [call("add", a=1, b=2), call("add", a=3, b=7), answer]

    def reply(prompt: str) -> str:
        return f"<think>step by step</think>{turns[min(prompt.count('sum='), 2)]}"

    return reply


async def answers_of(python: Path, library: str, *endpoints: ChatEndpoint) -> list[str]:
    """Run the program of a library, whose imports take longer than its rollouts, once for all."""
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(PROGRAMS), library),
        *(word for one in endpoints for word in (one.base_url, one.api_key, one.model)),
        env=os.environ | NOTHING_ELSEWHERE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            written, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2000:]
    return json.loads(written.decode().splitlines()[-1])


@pytest.fixture
async def opened():
    """Return a function that opens a rollout of the scripted model in training."""
    gateway = Gateway(model="policy")
    await gateway.start()

    def open_rollout(library: str, index: int):
        renderer = make_renderer(keep_thinking=True)
        pool = ScriptedPool(renderer, model_of(library))
        source = TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway)
        return source.policy(f"0.0/{index}", SAMPLING)

    yield open_rollout
    await gateway.close()


@pytest.mark.nightly
@pytest.mark.parametrize("library", sorted(MORE_SAMPLES))
async def test_further_libraries_are_trained_on_and_recorded_in_an_eval(opened, library):
    await play(python_with(MORE_REQUIREMENTS), opened, library)


@pytest.mark.parametrize("library", sorted(NUM_SAMPLES))
async def test_three_turns_with_tools_are_trained_on_and_recorded_in_an_eval(opened, library):
    await play(python_with(REQUIREMENTS), opened, library)


async def play(python, opened, library):
    """Let the program of a library add in training and in an eval, and look at both records."""
    trained, behind = opened(library, 0), opened(library, 1)
    served = behind.endpoint
    client = ChatClient(served.base_url, served.model, api_key=served.api_key)
    async with forwarding(client) as policies:
        evaluated = policies.policy("0/0", SAMPLING)
        endpoints = (trained.endpoint, evaluated.endpoint)
        assert await answers_of(python, library, *endpoints) == ["10", "10"]
        evaluated.close()
    await client.close()
    require_trained(library, trained)
    require_recorded(library, evaluated, behind)


def require_trained(library, policy) -> None:
    """Assert that what was sampled is trained on, in as few samples as the library allows."""
    assert len(policy.turns) == 3
    rollout = Rollout(
        environment="sums", example_id="e", group_id="g", index=0, turns=tuple(policy.turns)
    )
    samples = samples_from_rollout(rollout, 1.0, 1.0)
    assert len(samples) == (NUM_SAMPLES | MORE_SAMPLES)[library]
    sampled = sum(len(turn.completion.completion_ids) for turn in policy.turns)
    assert sum(int(sample.mask.sum()) for sample in samples) == sampled
    # smolagents sends the turns back as other messages, which is another conversation.
    leaves_out = len(samples) > 1 and library != "smolagents"
    assert policy.recorder.leaves_out_thinking is leaves_out


def require_recorded(library, policy, behind) -> None:
    """Assert that an eval has recorded the turns that the model `behind` it has answered."""
    assert [turn.completion.finish_reason for turn in policy.turns][:2] == ["tool_calls"] * 2
    assert [turn.completion.num_prompt_tokens for turn in policy.turns] == [
        len(turn.completion.prompt_ids) for turn in behind.turns
    ]
    conversations = policy.recorder.conversations
    assert len(conversations) == (3 if library == "smolagents" else 1)
    assert "sum=10" in "".join(message.content for message in conversations[-1])
