"""What the tests of adapters share: linked environments, played in their own virtual environments.

Each framework gets one virtual environment in the session, from pinned versions, as a user's does.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.asking import ask

from telescope_core import RolloutStatus, Split
from telescope_core.errors import EndpointError
from telescope_core.open import open_environment
from telescope_core.scripted import ScriptedClient

LIMIT_S = 2900
NUM_AT_ONCE = 6


def telescope(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-c", "from telescope_cli.main import main; main()", *arguments],
        env=dict(os.environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def link(name: str, *options: str) -> str:
    """Link `name`; returns the Python of its framework."""
    done = telescope("env", "link", name, *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["python"]


def by_itself(python: str, program: str, *arguments: str):
    """Return what a program that knows the framework alone prints as JSON."""
    done = subprocess.run(
        [python, "-c", program, *arguments],
        env={**os.environ, "INSPECT_DISPLAY": "none"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return json.loads(done.stdout.splitlines()[-1])


@asynccontextmanager
async def opened(name: str, settings: dict | None = None):
    client = open_environment(name, settings)
    try:
        yield client
    finally:
        await client.close()


async def played(client, replies, *, index: int = 0, rollout: int = 0, split=Split.TRAIN):
    request = ask(split=split, example_index=index, index=rollout, deadline_s=300.0)
    return await client.play(request, ScriptedClient(replies).policy("r"))


async def keeps_contract(client, replies: Sequence, reward: float, split=Split.TRAIN) -> None:
    """What every adapter must do: ids that stay, rollouts side by side, failures that are none.

    `replies` give the first example of `split` `reward`.
    """
    about = await client.describe()
    assert about.reward_min <= reward <= about.reward_max
    for one in about.num_examples:
        first, again = await client.example(one, 0), await client.example(one, 0)
        assert first == again
    if len(about.num_examples) == 2:
        train, held_out = [await client.example(split, 0) for split in (Split.TRAIN, Split.EVAL)]
        assert train.id != held_out.id
    together = (played(client, replies, rollout=i, split=split) for i in range(NUM_AT_ONCE))
    for rollout in await asyncio.gather(*together):
        assert rollout.status is RolloutStatus.KEPT, rollout.error
        assert rollout.reward == reward
        assert len(rollout.turns) == sum(m.role == "assistant" for m in rollout.messages)
        assert rollout.messages[0].role in ("system", "user")
    failed = await played(client, [EndpointError("the server is away")], split=split)
    assert failed.status is RolloutStatus.FAILED
    assert failed.reward is None
    assert "the server is away" in failed.error
    after = await played(client, replies, split=split)
    assert after.reward == reward, "a rollout that failed leaves nothing behind"
