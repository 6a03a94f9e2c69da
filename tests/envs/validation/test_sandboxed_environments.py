"""Programs of a model run in local sandboxes while an environment is validated, also as root."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from telescope_core.probes.guards import cut_off_network

print(cut_off_network())

from telescope_core.sandboxes import SandboxSpec, open_provider


async def ask():
    provider = open_provider("local")
    sandbox = await provider.create(SandboxSpec())
    print((await sandbox.run(["python3", "-c", "print(40 + 2)"])).text.strip())
    await provider.close()


asyncio.run(ask())
"""


@pytest.mark.slow
def test_a_sandbox_starts_where_the_network_is_cut_off():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n")[:2] == ["network namespace", "42"], done.stderr
