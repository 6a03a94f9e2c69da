"""Grade a step of a Harbor task: its tests run, and write numbers.

They run where the agent worked, or in a separate sandbox, to which the files that the task names
are copied. `harbor` creates the sandboxes.
"""

import asyncio
import io
import json
import math
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from telescope_adapters.harbor_images import packed
from telescope_adapters.harbor_tasks import HarborStep, HarborTask, resolved
from telescope_core.sandboxes.protocol import (
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxFileError,
    StopCause,
)

_FILES_S = 120.0
_SAID = 4000
_CARRIED = "/tmp/harbor-artifact.tar"
_MOST_BYTES = 1 << 30
"""Most that the files of one artifact are together; a larger one is not carried over."""
_EMPTIED = """
[ -d "$0" ] || rm -f "$0"
mkdir -p "$0"
[ -w "$0" ] && [ -x "$0" ] || chmod u+rwx "$0"
cd "$0" || exit
for folder in "$@"; do
    [ -w "${folder%/*}/" ] || chmod u+rwx "${folder%/*}/"
    if [ -h "$folder" ] || [ ! -d "$folder" ]; then rm -f "$folder" || exit; fi
    mkdir -p "$folder" && chmod -R u+rwX "$folder"
    find "$folder" -mindepth 1 -delete || exit
done
"""
_WRITABLE = """
for path in "$@"; do
    mkdir -p "${path%/*}/" || exit
    [ -w "${path%/*}/" ] || chmod u+rwx "${path%/*}/" || exit
done
"""
_UNPACKED = 'mkdir -p "$1" && exec tar -xf - --no-same-owner -C "$1"'


class SpoiledError(SandboxError):
    """What an agent left keeps its work from being graded, as where it has filled the disk."""

    is_transient = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSandbox:
    """A sandbox of a task that is ready, and how commands are run in it."""

    task: str
    """Name of the task, for messages."""
    box: Sandbox
    folder: str
    """The working directory."""
    variables: Mapping[str, str]
    proxy: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables by which programs find the proxy to the hosts that they may reach."""

    async def run(
        self, argv: Sequence[str], limit_s: float, more: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command of the task in its folder, with its variables and `more`."""
        environment = {**self.variables, **self.proxy, **resolved(more or {})}
        return await self.box.run(
            argv, environment=environment, folder=self.folder, timeout_s=limit_s
        )

    async def empty(self, *folders: str) -> None:
        """Leave nothing in `folders`, which are made if they are not there.

        The working directory is made too. Raises SpoiledError where a command fails.
        """
        done = await self.box.run(["sh", "-c", _EMPTIED, self.folder, *folders])
        self._require_unspoiled(done, f"{' and '.join(folders)} cannot be emptied")

    async def unpack(self, files: bytes, folder: str) -> None:
        """Put the files of a tar below `folder`, which is made if it is not there.

        Raises SpoiledError where that fails.
        """
        done = await self.box.run(
            ["sh", "-c", _UNPACKED, "sh", folder], stdin=files, timeout_s=_FILES_S
        )
        self._require_unspoiled(done, f"files cannot be copied to {folder}")

    def require(self, done: CommandResult, what: str) -> None:
        """Raise SandboxError unless a command that is no doing of the agent succeeded."""
        if not done.succeeded:
            said = f"{done.text}\n{done.error_text}".strip()[-300:]
            raise SandboxError(f"{self.task}: {what} ({done.stop}, exit {done.exit_code}): {said}")

    def _require_unspoiled(self, done: CommandResult, what: str) -> None:
        try:
            self.require(done, what)
        except SandboxError as error:
            # 127: the image lacks the program.
            if done.stop in (StopCause.EXITED, StopCause.MEMORY) and done.exit_code != 127:
                raise SpoiledError(str(error)) from None
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """The results of the tests of one step."""

    numbers: Mapping[str, float]
    """`reward` and others by name; not empty."""
    said: str
    """The end of what they printed."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A file or folder of the agent's sandbox."""

    path: str
    is_folder: bool
    files: bytes
    """A tar of paths below `/`."""


async def graded(place: TaskSandbox, step: HarborStep) -> Graded:
    """Run the tests of `step`, and return what they wrote.

    Raises SandboxError where they wrote no number: that says nothing of what the agent did.
    """
    has_tests = step.grader is not None and step.grader.has_tests
    # The image, or the agent, may have left a reward or a helper there.
    await place.empty("/logs/verifier", *([] if has_tests else ["/tests"]))
    for folder in step.tests if not has_tests else ():
        if folder.is_dir():
            await place.unpack(await asyncio.to_thread(packed, folder), "/tests")
    done = await place.run(["bash", "/tests/test.sh"], step.verifier_s, step.verifier_env)
    # One of its processes may have met the limit of the memory, and the script gone on.
    if done.stop in (StopCause.TIMEOUT, StopCause.SANDBOX_ENDED):
        raise SandboxError(
            f"{place.task}: its verifier did not end by itself ({done.stop}, limit "
            f"{step.verifier_s:g} s)"
        )
    said = f"{done.error_text}\n{done.text}".strip()[-_SAID:]
    return Graded(numbers=await _written(place, said), said=said, wall_s=done.wall_s)


def ungraded(why: SpoiledError) -> Graded:
    """Return the results of a step that its agent has kept from being graded: reward 0."""
    return Graded(numbers={"reward": 0.0}, said=str(why), wall_s=0.0)


def combined(task: HarborTask, steps: Sequence[Graded]) -> dict[str, float]:
    """Return the numbers of a rollout from those of the steps that were played, one at least.

    The mean of each, a number that a step has not written counting as 0; or those of the last step.
    Raises SandboxError where none of them is the reward.
    """
    if task.table.multi_step_reward_strategy == "final":
        steps = steps[-1:]
    names = dict.fromkeys(name for step in steps for name in step.numbers)
    found = {
        name: sum(step.numbers.get(name, 0.0) for step in steps) / len(steps) for name in names
    }
    if "reward" not in found:
        raise SandboxError(_without_number(task.name, steps[-1].said))
    return found


async def carried(place: TaskSandbox, step: HarborStep) -> list[Carried]:
    """Return the files that the verifier of `step` is given; what is not there is left out."""
    found: list[Carried] = []
    for artifact in step.artifacts:
        path = posixpath.normpath(posixpath.join(place.folder, artifact.source))
        excluded = [f"--exclude={pattern}" for pattern in artifact.exclude]
        argv = ["tar", "-cf", _CARRIED, *excluded, "-C", "/", path.lstrip("/")]
        await place.box.run(argv, timeout_s=_FILES_S)
        try:
            archive = await place.box.read(_CARRIED)
            one = await asyncio.to_thread(_plain_files, archive, path)
        except (SandboxFileError, tarfile.TarError, ValueError, OSError):
            # Its programs are the agent's by now, as are the files.
            one = None
        if one is not None:
            found.append(one)
        await place.box.run(["rm", "-rf", _CARRIED])
    return found


def _plain_files(archive: bytes, path: str) -> Carried | None:
    """Return the files and folders at or below `path`; None if there are none.

    The sandbox in which an agent had its way made `archive`: links, other paths and who may run a
    file as somebody else are left out. Raises ValueError for more than `_MOST_BYTES`.
    """
    root, held, num_bytes = path.lstrip("/"), io.BytesIO(), 0
    is_folder: bool | None = None
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as given,
        tarfile.open(fileobj=held, mode="w") as kept,
    ):
        for info in given:
            name = posixpath.normpath(info.name).lstrip("/")
            is_inside = name == root or name.startswith(f"{root}/")
            if not is_inside or not (info.isfile() or info.isdir()):
                continue
            num_bytes += info.size
            if num_bytes > _MOST_BYTES:
                raise ValueError(f"{path} has more than {_MOST_BYTES} bytes")
            clean = tarfile.TarInfo(name)
            clean.type = tarfile.DIRTYPE if info.isdir() else tarfile.REGTYPE
            clean.mode, clean.size = info.mode & 0o777, info.size if info.isfile() else 0
            kept.addfile(clean, given.extractfile(info) if info.isfile() else None)
            is_folder = info.isdir() if name == root else is_folder
    if is_folder is None:
        return None
    return Carried(path=path, is_folder=is_folder, files=held.getvalue())


async def hand_over(place: TaskSandbox, files: Sequence[Carried]) -> None:
    """Put what was carried over to where it was; a folder has nothing else in it then.

    Raises SandboxError where the image does not let its user write there, which no agent has done.
    """
    done = await place.box.run(["sh", "-c", _WRITABLE, "sh", *(one.path for one in files)])
    place.require(done, "its verifier's user cannot write where its artifacts belong")
    for one in files:
        if one.is_folder:
            await place.empty(one.path)
        await place.unpack(one.files, "/")


async def _written(place: TaskSandbox, said: str) -> dict[str, float]:
    """Return the numbers of the reward files; the JSON goes before the text."""
    numbers: dict[str, float] = {}
    found: list[str | None] = []
    for name in ("reward.json", "reward.txt"):
        try:
            found.append((await place.box.read(f"/logs/verifier/{name}")).decode(errors="replace"))
        except SandboxFileError:
            found.append(None)
    try:
        if found[0] is not None:
            values = json.loads(found[0])
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
            numbers = _numbers(cast(dict[str, object], values))
        if "reward" not in numbers and found[1] is not None:
            numbers["reward"] = float(found[1])
    except ValueError as error:
        raise SandboxError(
            f"{place.task}: the reward that its verifier wrote cannot be read: {error}"
        ) from None
    if not numbers or not all(map(math.isfinite, numbers.values())):
        raise SandboxError(_without_number(place.task, said))
    return numbers


def _without_number(task: str, said: str) -> str:
    return (
        f"{task}: its verifier wrote no number as reward to /logs/verifier/reward.json or "
        f"reward.txt; it said last: {said[-300:]!r}"
    )


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return what is a finite number; a truth value is none."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
