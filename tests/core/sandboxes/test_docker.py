"""The provider `docker`, over a real podman: the checks of every provider, and what is its own."""

import asyncio
import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from tests.core.sandboxes.containers import IMAGE, podman_service

from telescope_core.sandboxes import (
    CallTest,
    Network,
    SandboxError,
    SandboxLimitError,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailableError,
    StopCause,
    grade_program,
    open_provider,
)
from telescope_core.sandboxes.check import CHECKS, Subject

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    # The path of a socket must be short, which that of tmp_path is not.
    with (
        tempfile.TemporaryDirectory(prefix="podman-") as folder,
        podman_service(Path(folder)) as at,
    ):
        yield at


@pytest.fixture
async def provider(address):
    made = open_provider("docker", base_url=address, image=IMAGE)
    yield made
    await made.close()
    assert _containers(address) == ""


def _containers(address: str) -> str:
    return _podman(address, "ps", "--all", "--quiet")


def _podman(address: str, *words: str) -> str:
    """What podman prints; one that is told of a container that is gone by now fails, as it may."""
    command = ["podman", "--url", address, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


@pytest.mark.parametrize("check", CHECKS)
async def test_contract(provider, check):
    await CHECKS[check](Subject(provider=provider, spec=SandboxSpec(disk_mb=32)))


async def test_limits_are_those_of_the_spec(provider):
    box = await provider.create(SandboxSpec(disk_mb=8, max_processes=20, memory_mb=128))
    fill = "open('/tmp/x', 'wb').write(b'x' * (16 << 20))"
    assert b"No space left" in (await box.run(["python3", "-c", fill])).stderr
    forks = (
        "import os, time\nn = 0\ntry:\n    while n < 60:\n        if os.fork() == 0:\n"
        "            time.sleep(5); os._exit(0)\n        n += 1\nexcept OSError: pass\nprint(n)"
    )
    assert int((await box.run(["python3", "-c", forks])).text) < 20
    await box.close()
    box = await provider.create(SandboxSpec())
    assert b"Read-only" in (await box.run(["touch", "/usr/x"])).stderr
    assert (await box.run(["id", "-u"])).text == "65534\n"


async def test_the_grader_and_the_pool_work_with_it(provider):
    async with SandboxPool(provider, max_open=2, num_warm=1, max_uses=2) as pool:
        for _ in range(3):
            async with pool.take() as box:
                tests = [CallTest(function="f", arguments=[n], expected=n + 1) for n in (1, 2)]
                grade = await grade_program(box, "def f(x): return x + 1", tests)
                assert grade.passed, grade
        assert (pool.usage().num_reused, pool.usage().num_discarded) == (1, 0)


async def test_a_container_that_is_gone_is_the_providers_failure(provider, address):
    box = await provider.create(SandboxSpec())
    await asyncio.to_thread(_podman, address, "kill", box.id)
    with pytest.raises(SandboxError, match="docker failed"):
        await box.run(["true"])
    await box.close()


async def test_at_the_end_of_its_time_a_container_is_gone_with_its_command(provider, address):
    box = await provider.create(SandboxSpec(time_to_live_s=2.0))
    done = await box.run(["sleep", "60"])
    assert done.stop is StopCause.SANDBOX_ENDED, done
    await asyncio.to_thread(_podman, address, "wait", box.id)
    assert not box.is_alive


async def test_no_more_is_given_than_the_machine_of_the_service_has(provider):
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    for name, most in (("cpus", os.cpu_count()), ("memory_mb", memory_mb), ("disk_mb", memory_mb)):
        with pytest.raises(SandboxLimitError, match=f"{name}={most + 1} .at most {most}, the "):
            await provider.create(SandboxSpec(**{name: most + 1}))
    least = SandboxSpec(memory_mb=16, disk_mb=1, max_processes=8)
    box = await provider.create(least)
    assert (await box.run(["python3", "-c", "print(1)"])).text == "1\n"


SPEAKS_FOR_THE_RELAY = """
import glob, os, sys
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if b"MAX_" + b"CHANNELS" in open(path, "rb").read():
        with open(os.path.dirname(path) + "/fd/1", "wb") as words:
            words.write(b"x" * 4096)
        print("spoke")
"""
ASKS = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) as asking:
    asking.settimeout(5)
    try:
        asking.sendall(b"x")
        print(asking.recv(9))
    except OSError:
        print(b"")
"""


async def test_a_program_that_speaks_for_the_relay_only_cuts_itself_off(provider):
    """It runs as the same user, so it can; what it says can be nothing but connections."""

    async def answer(reader, writer):
        writer.write(b"y" + await reader.read(1))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    box = await provider.create(SandboxSpec(network=Network.ENDPOINT))
    port = server.sockets[0].getsockname()[1]
    for spoken, said in ((False, "b'yx'\n"), (True, "b''\n")):
        async with box.opened("127.0.0.1", port) as address:
            if spoken:
                assert (await box.run(["python3", "-c", SPEAKS_FOR_THE_RELAY])).text == "spoke\n"
            done = await box.run(["python3", "-c", ASKS, address.rpartition(":")[2]])
            assert done.text in (said, ""), done
    async with box.opened("127.0.0.1", port) as address:
        done = await box.run(["python3", "-c", ASKS, address.rpartition(":")[2]])
        assert done.text == "b'yx'\n", done
    server.close()


async def test_an_image_that_is_missing_is_refused_with_what_to_run(provider, address):
    with pytest.raises(SandboxUnavailableError, match="docker pull no-such:1"):
        await provider.create(SandboxSpec(image="no-such:1"))
    assert _containers(address) == ""


async def test_without_a_service_it_is_refused_with_what_to_do(tmp_path):
    missing = open_provider("docker", base_url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailableError, match="no Docker answers at unix:"):
        await missing.create(SandboxSpec())
    await missing.close()
    assert os.listdir(tmp_path) == []


async def test_as_its_image_a_container_is_roots_and_can_be_written(address):
    made = open_provider("docker", base_url=address, image=IMAGE, as_image=True)
    try:
        with pytest.raises(SandboxLimitError, match="disk_mb"):
            await made.create(SandboxSpec(disk_mb=8))
        box = await made.create(SandboxSpec(memory_mb=128))
        done = await box.run(["sh", "-c", "id -u; echo 1 > /usr/x; cat /usr/x"])
        assert done.text == "0\n1\n", done
        await box.write("/app/x", b"2")
        assert await box.read("/app/x") == b"2"
    finally:
        await made.close()


def _context(dockerfile: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in (("Dockerfile", dockerfile), ("words", "a b\n")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


async def test_an_image_is_built_once_and_one_that_cannot_be_says_why(provider):
    told = f"FROM {IMAGE}\nWORKDIR /app\nCOPY words words\nENV MARK=yes\n"
    first = await provider.build(_context(told), "telescope-built:1", 300.0)
    again = await provider.build(b"not looked at", "telescope-built:1", 300.0)
    assert first == again
    box = await provider.create(SandboxSpec(image="telescope-built:1"))
    done = await box.run(["sh", "-c", "cat /app/words; echo $MARK"])
    assert done.text == "a b\nyes\n", done
    failing = _context(f"FROM {IMAGE}\nRUN echo no such words; false\n")
    with pytest.raises(SandboxError, match="no such words"):
        await provider.build(failing, "telescope-built:2", 300.0)


async def test_an_address_is_opened_beside_the_whole_network(address):
    made = open_provider("docker", base_url=address, image=IMAGE, as_image=True)
    heard = await asyncio.start_server(
        lambda _, writer: (writer.write(b"there\n"), writer.close()), "127.0.0.1", 0
    )
    port = heard.sockets[0].getsockname()[1]
    ask = "import socket, sys; host, port = sys.argv[1].split(':'); "
    ask += "print(socket.create_connection((host, int(port))).makefile().read(), end='')"
    try:
        box = await made.create(SandboxSpec(memory_mb=128, network=Network.FULL))
        async with box.opened("127.0.0.1", port) as at:
            assert (await box.run(["python3", "-c", ask, at])).text == "there\n"
    finally:
        heard.close()
        await made.close()
