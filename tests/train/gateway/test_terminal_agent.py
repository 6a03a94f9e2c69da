"""The program of the harness `terminal` at a gateway: its turns are one sample, with thinking."""

import asyncio
import json
import sys

import pytest
from test_anthropic_client import require_trained_once

from telescope_core.harnesses import AgentTask, open_harness


@pytest.mark.slow
async def test_each_turn_goes_on_from_the_tokens_of_the_one_before(serve, tmp_path):
    asks = iter([{"commands": [{"keys": "echo a\n"}]}, "no object", {"done": True, "answer": "ok"}])
    rollout = serve(lambda prompt: f"<think>hm</think> {json.dumps(next(asks))}\n")
    program = open_harness("terminal").program(
        AgentTask(
            text="do",
            base_url=rollout.endpoint.base_url,
            api_key=rollout.endpoint.api_key,
            model=rollout.endpoint.model,
            python=sys.executable,
            max_turns=9,
        )
    )
    answer, task = tmp_path / "answer.txt", tmp_path / "task.json"
    [asked] = [json.loads(text) for path, text in program.files.items() if "task.json" in path]
    task.write_text(json.dumps({**asked, "answer_file": str(answer)}))
    source = tmp_path / "program.py"
    source.write_text(next(text for path, text in program.files.items() if path.endswith(".py")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(source), str(task)), env=dict(program.environment)
    )
    assert await process.wait() == 0
    assert answer.read_text() == "ok"
    assert len(rollout.policy.turns) == 3
    require_trained_once(rollout, 1)
