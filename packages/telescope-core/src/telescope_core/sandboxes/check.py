"""The self-check of a provider: required behavior of every sandbox, tested on a real one.

The tests of each provider run the same checks, so that an author of a provider gets both.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from telescope_core.sandboxes.protocol import (
    KILLED,
    OUT_OF_CPU_TIME,
    WORK_FOLDER,
    Limit,
    Network,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxProvider,
    SandboxSpec,
    StopCause,
)

_CLOSE_S = 60.0
_SPIN_S = 300.0
_MORE_THAN_ANY_HAS = 10**18
_CONNECT = """
import socket
try:
    socket.create_connection(("1.1.1.1", 53), 3)
    print("connected")
except OSError as error:
    print("refused")
"""
_GREET = """
import socket, sys
host, port = sys.argv[1].split(":")
with socket.create_connection((host, int(port)), 5) as connection:
    connection.sendall(b"there\\n")
    print(connection.makefile().read(), end="")
"""


class CheckFailedError(Exception):
    """A sandbox did something else than was expected of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """The result of one check."""

    check: str
    passed: bool
    said: str
    """Description of the failure; empty if there is none."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The provider under test, and the spec of the sandboxes for the test."""

    provider: SandboxProvider
    spec: SandboxSpec

    @asynccontextmanager
    async def sandbox(self, **changes: object) -> AsyncGenerator[Sandbox]:
        """Yield a new sandbox, with fields of the spec replaced, and close it."""
        made = await self.provider.create(replace(self.spec, **changes))  # pyright: ignore[reportArgumentType]
        try:
            yield made
        finally:
            await made.close()


Check = Callable[[Subject], Awaitable[None]]


def _expect(is_so: bool, expected: str, came: object) -> None:
    if not is_so:
        raise CheckFailedError(f"expected {expected}, got {came!r:.400}")


async def _exit_codes_and_streams(subject: Subject) -> None:
    async with subject.sandbox() as box:
        done = await box.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        _expect(done.exit_code == 3 and done.stop is StopCause.EXITED, "exit code 3", done)
        _expect((done.stdout, done.stderr) == (b"out\n", b"err\n"), "both streams apart", done)
        done = await box.run(["sh", "-c", "kill -TERM $$"])
        _expect(done.exit_code == 143, "exit code 143 after SIGTERM", done)
        done = await box.run(["no-such-program-anywhere"])
        _expect(done.exit_code == 127, "exit code 127 for a missing program", done)


async def _words_are_not_interpreted(subject: Subject) -> None:
    words = ["a b", "$HOME", "'", '"', "`id`", ";", "*", "", "new\nline", "\\"]
    async with subject.sandbox() as box:
        done = await box.run(["printf", "%s|", *words])
        _expect(done.stdout == "".join(f"{w}|" for w in words).encode(), "the same words", done)


async def _standard_input(subject: Subject) -> None:
    data = bytes(range(256)) * 300
    async with subject.sandbox() as box:
        done = await box.run(["cat"], stdin=data)
        _expect(done.stdout == data, "the bytes of standard input back", len(done.stdout))
        done = await box.run(["cat"])
        _expect(done.succeeded and not done.stdout, "an empty standard input", done)


async def _environment_and_folder(subject: Subject) -> None:
    async with subject.sandbox() as box:
        await box.write("deep/file", b"")
        words = ["sh", "-c", 'printf %s "$GIVEN"; pwd']
        done = await box.run(words, environment={"GIVEN": "a b'c"}, folder="deep")
        _expect(done.text == f"a b'c{WORK_FOLDER}/deep\n", "variable and folder", done)
        done = await box.run(["pwd"])
        _expect(done.text == f"{WORK_FOLDER}\n", f"to start in {WORK_FOLDER}", done)


async def _files(subject: Subject) -> None:
    data = bytes(range(256)) * 64
    async with subject.sandbox() as box:
        await box.write("made/here.bin", data)
        _expect(await box.read("made/here.bin") == data, "the bytes that were written", "others")
        await box.run(["sh", "-c", "printf inside > made/'with space'; mkdir made/folder"])
        found = {one.name: (one.is_folder, one.size_bytes) for one in await box.list("made")}
        expected = {"here.bin": (False, len(data)), "with space": (False, 6), "folder": (True, 0)}
        _expect(found == expected, "three entries with their sizes", found)
        _expect(await box.read(f"{WORK_FOLDER}/made/with space") == b"inside", "b'inside'", "")
        for path in ("nowhere", "made/folder"):
            try:
                came = await box.read(path)
            except SandboxFileError:
                continue
            raise CheckFailedError(f"expected SandboxFileError for {path}, got {came!r:.100}")


async def _timeout(subject: Subject) -> None:
    ignores = "trap '' TERM; echo began; while :; do sleep 1; done"
    async with subject.sandbox() as box:
        done = await box.run(["sh", "-c", ignores], timeout_s=2.0)
        _expect(done.stop is StopCause.TIMEOUT, "a timeout, though SIGTERM is ignored", done)
        _expect(done.exit_code == KILLED, f"exit code {KILLED}", done)
        _expect(done.stdout == b"began\n", "what was written before", done)
        done = await box.run(["echo", "on"])
        _expect(done.text == "on\n", "the sandbox to be usable after a timeout", done)
        done = await box.run(["sleep", "60"], timeout_s=0.0001)
        _expect(done.stop is StopCause.TIMEOUT, "a timeout after less than a millisecond", done)


async def _processor_time(subject: Subject) -> None:
    async with subject.sandbox() as box:
        spin = ["sh", "-c", "echo began; while :; do :; done"]
        done = await box.run(spin, timeout_s=_SPIN_S, cpu_timeout_s=0.5)
        _expect(done.stop is StopCause.TIMEOUT, "a timeout by processor time", done)
        _expect(done.exit_code == OUT_OF_CPU_TIME, f"exit code {OUT_OF_CPU_TIME}", done)
        _expect(done.stdout == b"began\n", "what was written before", done)
        done = await box.run(["sh", "-c", "sleep 2; echo on"], cpu_timeout_s=0.5)
        _expect(done.text == "on\n", "time that is waited not to count as processor time", done)
        done = await box.run(["sh", "-c", "ulimit -t"])
        _expect(done.text == "unlimited\n", "no limit in the next command", done)


async def _output_is_cut(subject: Subject) -> None:
    async with subject.sandbox(max_output_bytes=1000) as box:
        flood = "i=0; while [ $i -lt 2000 ]; do echo 0123456789012345678901234; i=$((i+1)); done"
        done = await box.run(["sh", "-c", flood])
        _expect(len(done.stdout) == 1000, "1000 bytes of output", len(done.stdout))
        _expect(done.num_dropped_bytes == 51000, "51000 bytes dropped", done.num_dropped_bytes)
        _expect(done.exit_code == 0, "exit code 0 all the same", done.exit_code)


async def _sandboxes_are_apart(subject: Subject) -> None:
    async with subject.sandbox() as one, subject.sandbox() as other:
        await one.write("mine", b"1")
        names = [entry.name for entry in await other.list()]
        _expect("mine" not in names, "no file of another sandbox", names)
        results = await asyncio.gather(one.run(["echo", "1"]), other.run(["echo", "2"]))
        _expect([r.text for r in results] == ["1\n", "2\n"], "both at once", results)


async def _commands_wait_for_each_other(subject: Subject) -> None:
    async with subject.sandbox() as box:
        step = "n=$(cat n 2>/dev/null || echo 0); echo $((n+1)) > n"
        await asyncio.gather(*(box.run(["sh", "-c", step]) for _ in range(4)))
        _expect((await box.read("n")).strip() == b"4", "four steps one after another", "fewer")


async def _cancelled_command(subject: Subject) -> None:
    async with subject.sandbox() as box:
        waiting = asyncio.create_task(box.run(["sh", "-c", "echo on > began; sleep 600"]))
        await asyncio.wait([waiting], timeout=1.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        _expect(waiting.cancelled(), "the command to be cancelled", waiting)
        if box.is_alive:
            done = await box.run(["echo", "on"])
            _expect(done.text == "on\n", "a live sandbox to go on after a cancellation", done)


async def _closing(subject: Subject) -> None:
    box = await subject.provider.create(subject.spec)
    await box.close()
    async with asyncio.timeout(_CLOSE_S):
        await box.close()
    _expect(not box.is_alive, "a closed sandbox to say so", box)
    try:
        done = await box.run(["true"])
    except SandboxError:
        return
    raise CheckFailedError(f"expected SandboxError from a closed sandbox, got {done!r}")


async def _limits_that_cannot_be_given_are_refused(subject: Subject) -> None:
    asked: Mapping[Limit, dict[str, object]] = {
        Limit.IMAGE: {"image": "no-image-of-this-name"},
        Limit.CPUS: {"cpus": 1.0},
        Limit.MEMORY: {"memory_mb": 512},
        Limit.DISK: {"disk_mb": 64},
        Limit.PROCESSES: {"max_processes": 32},
        Limit.NETWORK_NONE: {"network": Network.NONE},
        Limit.NETWORK_ENDPOINT: {"network": Network.ENDPOINT},
        Limit.NETWORK_FULL: {"network": Network.FULL},
    }
    amounts = (Limit.CPUS, Limit.MEMORY, Limit.DISK, Limit.PROCESSES, Limit.TIME_TO_LIVE)
    for limit, changes in asked.items():
        if limit not in subject.provider.limits:
            await _require_refused(subject, limit, changes)
    for limit in amounts:
        await _require_refused(subject, limit, {limit.value: _MORE_THAN_ANY_HAS})


async def _require_refused(subject: Subject, limit: Limit, changes: dict[str, object]) -> None:
    try:
        async with subject.sandbox(**changes):
            pass
    except SandboxLimitError as error:
        _expect(limit.value in str(error), f"an error that names {limit.value}", str(error))
        return
    raise CheckFailedError(f"expected {limit.value} to be refused, and it was not")


async def _no_network(subject: Subject) -> None:
    if Limit.NETWORK_NONE not in subject.provider.limits:
        return
    async with subject.sandbox(network=Network.NONE) as box:
        done = await box.run(["python3", "-c", _CONNECT], timeout_s=20.0)
        _expect(done.text == "refused\n", "no connection to the outside", done)


async def _one_address_opened(subject: Subject) -> None:
    if Limit.NETWORK_ENDPOINT not in subject.provider.limits:
        return

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    try:
        async with subject.sandbox(network=Network.ENDPOINT) as box:
            async with box.opened("127.0.0.1", port) as address:
                done = await box.run(["python3", "-c", _GREET, address])
                _expect(done.text == "hello there\n", "the answer of the opened address", done)
                done = await box.run(["python3", "-c", _GREET, f"127.0.0.1:{port}"])
                _expect(not done.stdout, "no other address of this machine", done)
                done = await box.run(["python3", "-c", _CONNECT], timeout_s=20.0)
                _expect(done.text == "refused\n", "no connection to the outside", done)
            done = await box.run(["python3", "-c", _GREET, address])
            _expect(not done.stdout, "no answer after the block", done)
    finally:
        server.close()


async def _memory_in_one_process(subject: Subject) -> None:
    if Limit.MEMORY not in subject.provider.limits:
        return
    # Some services give whole GiB alone.
    for memory_mb in (256, 1024):
        held = f"held = bytearray({3 * memory_mb} << 20)"
        code = f"{held}\nfor i in range(0, len(held), 4096): held[i] = 1\nprint(1)"
        try:
            async with subject.sandbox(memory_mb=memory_mb) as box:
                done = await box.run(["python3", "-c", code])
        except SandboxLimitError:
            continue
        _expect(not done.succeeded and not done.stdout, "thrice the memory to be refused", done)
        return
    raise CheckFailedError("expected memory_mb of 256 or 1024 to be given, and neither was")


async def _time_to_live(subject: Subject) -> None:
    if subject.spec.time_to_live_s < _CLOSE_S:
        return
    async with subject.sandbox(time_to_live_s=60.0) as box:
        _expect((await box.run(["true"])).succeeded, "a command within the time to live", "none")


CHECKS: Mapping[str, Check] = {
    "exit codes and streams": _exit_codes_and_streams,
    "words are not interpreted": _words_are_not_interpreted,
    "standard input": _standard_input,
    "environment and folder": _environment_and_folder,
    "files": _files,
    "timeout": _timeout,
    "processor time": _processor_time,
    "output is cut": _output_is_cut,
    "sandboxes are apart": _sandboxes_are_apart,
    "commands wait for each other": _commands_wait_for_each_other,
    "cancelled command": _cancelled_command,
    "closing": _closing,
    "limits that cannot be given are refused": _limits_that_cannot_be_given_are_refused,
    "no network": _no_network,
    "one address opened": _one_address_opened,
    "memory in one process": _memory_in_one_process,
    "time to live": _time_to_live,
}
"""The checks by name, in their order."""


async def check_provider(
    provider: SandboxProvider,
    spec: SandboxSpec | None = None,
    *,
    on_finding: Callable[[CheckFinding], None] = lambda finding: None,
) -> list[CheckFinding]:
    """Run every check on sandboxes of `provider`, and return all results.

    Raises SandboxUnavailableError and SandboxLimitError where no sandbox can be made at all.
    """
    subject = Subject(provider=provider, spec=spec or SandboxSpec())
    async with subject.sandbox():
        pass
    findings: list[CheckFinding] = []
    for name, check in CHECKS.items():
        began_s, said = time.monotonic(), ""
        try:
            await check(subject)
        except (CheckFailedError, SandboxError, SandboxFileError, SandboxLimitError) as error:
            said = f"{type(error).__name__}: {error}"
        wall_s = time.monotonic() - began_s
        finding = CheckFinding(check=name, passed=not said, said=said, wall_s=wall_s)
        findings.append(finding)
        on_finding(finding)
    return findings
