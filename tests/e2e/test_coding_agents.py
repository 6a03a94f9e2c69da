"""Coding agents from the npm registry, unmodified, as the page about them starts them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.asking import ask

from telescope_core import RolloutStatus
from telescope_core.gateway import Gateway, RecordedEnvironment
from telescope_core.harnesses import AgentConfig
from telescope_core.in_process import InProcessEnvironment
from telescope_core.sandboxes.protocol import WORK_FOLDER
from telescope_core.types import Sampling
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.policy import TokenPolicySource

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "gateway"))
from scripted_pool import ScriptedPool, make_renderer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-a-coding-agent.md"
SAMPLING = Sampling(max_tokens=4000, temperature=0.9)
LIMIT_S = 600.0
WRITTEN = f"{WORK_FOLDER}/hello.txt"
CALLS = {
    "claude-code": [
        ("Write", {"file_path": WRITTEN, "content": "hi\n"}),
        ("Bash", {"command": "cat hello.txt", "description": "show"}),
    ],
    "codex": [
        ("exec_command", {"cmd": "echo hi > hello.txt"}),
        ("exec_command", {"cmd": "cat hello.txt"}),
    ],
    "opencode": [
        ("write", {"filePath": WRITTEN, "content": "hi\n"}),
        ("bash", {"command": "cat hello.txt", "description": "show"}),
    ],
    "pi": [
        ("write", {"path": WRITTEN, "content": "hi\n"}),
        ("bash", {"command": "cat hello.txt"}),
    ],
}
"""Agent -> how it is asked to write the file, and to show it."""
PACKAGES = dict(
    zip(CALLS, re.findall(r"\| `([@a-z/-]+)` [0-9.]+ \|", PAGE.read_text()), strict=True)
)
VERSIONS = dict(re.findall(r"\| `([@a-z/-]+)` ([0-9.]+) \|", PAGE.read_text()))


@pytest.fixture
def programs(name) -> Iterator[Path]:
    """Install one agent where sandboxes can read it."""
    with tempfile.TemporaryDirectory(prefix="coding-agents-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        package = f"{PACKAGES[name]}@{VERSIONS[PACKAGES[name]]}"
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, package]
        subprocess.run(npm, check=True, timeout=LIMIT_S)
        yield place


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_its_rollout_is_trained_on_exactly_what_was_sampled(name, programs, monkeypatch):
    monkeypatch.setitem(os.environ, "CODING_AGENTS", str(programs))
    monkeypatch.setitem(os.environ, "CODING_AGENT", name)
    source = re.search(r'title="coding.py"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert source is not None
    namespace: dict = {"__name__": "coding"}
    exec(compile(source[1], str(PAGE), "exec"), namespace)

    def reply(prompt: str) -> str:
        done = prompt.count("<|tool|>")
        if done == len(CALLS[name]):
            return "<think>it is there</think>All is done."
        tool, arguments = CALLS[name][done]
        asked = json.dumps({"name": tool, "arguments": arguments})
        return f"<think>step {done}</think><tool_call>\n{asked}\n</tool_call>"

    gateway = Gateway(model="policy")
    await gateway.start()
    renderer = make_renderer(keep_thinking=True)
    pool = ScriptedPool(renderer, reply)
    policies = TokenPolicySource(pool, renderer, max_model_len=None, gateway=gateway)
    policy = policies.policy("0.0/0", SAMPLING)
    environment = namespace["Coding"](AgentConfig(agent_timeout_s=LIMIT_S))
    client = RecordedEnvironment(InProcessEnvironment(environment, name="coding"))
    rollout = await client.play(ask(deadline_s=2 * LIMIT_S, sampling=SAMPLING), policy)
    await client.close()
    await gateway.close()
    wrote = {note.key: note.value[-2000:] for note in rollout.info}
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), (rollout.error, wrote)
    assert rollout.completion_text.endswith("All is done."), wrote
    [sample] = samples_from_rollout(rollout, 1.0, 1.0)
    sampled = [one for turn in rollout.turns for one in turn.completion.completion_ids]
    assert sample.token_ids[sample.mask].tolist() == sampled
    assert len(rollout.turns) == len(CALLS[name]) + 1
