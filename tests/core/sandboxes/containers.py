"""A podman of its own with an image made of this machine's files: containers without a network."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.core.sandboxes.attacks import processes_of

IMAGE = "localhost/telescope-test:1"
PROGRAMS = (
    *("sh", "bash", "timeout", "env", "mkdir", "mktemp", "wc", "head", "base64", "cat", "rm"),
    *("printf", "ls", "sleep", "tr", "chmod", "find", "id", "true", "echo", "touch", "pwd"),
    *("seq", "kill", "test", "sed", "tar", "readlink", "chown"),
)
AGENT_PYTHON = "/opt/agent/bin/python"
"""The interpreter of the virtual environment of an image that has one."""


def _libraries(binary: Path) -> set[Path]:
    done = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False)
    words = [word for line in done.stdout.splitlines() for word in line.split()]
    return {Path(word) for word in words if word.startswith("/")}


def _agent_files(agent: Path) -> dict[str, Path]:
    """The files of a virtual environment, with what its compiled modules need."""
    found = [path for path in agent.rglob("*") if path.is_file() and not path.is_symlink()]
    needed = {one for path in found if path.suffix == ".so" for one in _libraries(path)}
    return {
        **{str(one): one.resolve() for one in needed if not one.is_relative_to(agent)},
        **{f"/opt/agent/{path.relative_to(agent)}": path for path in found},
    }


def image_tar(agent: Path | None = None) -> bytes:
    """A root folder with a shell, coreutils and Python, from the files of this machine.

    `agent` is a virtual environment of the system's Python, to be had as `/opt/agent`.
    """
    python = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib", python.name)
    files: dict[str, Path] = {f"/usr/bin/{python.name}": python, "/usr/bin/python3": python}
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found:
            files[f"/usr/bin/{name}"] = Path(found).resolve()
    binaries = {*files.values(), *library.glob("lib-dynload/*.so")}
    for one in {found for binary in binaries for found in _libraries(binary)}:
        files[str(one)] = one.resolve()
    for path in library.rglob("*.py"):
        if not {"test", "idlelib", "dist-packages"} & set(path.parts):
            files[str(path)] = path
    for path in library.glob("lib-dynload/*.so"):
        files[str(path)] = path
    files |= _agent_files(agent) if agent is not None else {}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ("tmp", "proc", "dev", "sys", "etc", "run"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
        for name, target in (("bin", "usr/bin"), (AGENT_PYTHON.lstrip("/"), str(python))):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, path in files.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = path.stat().st_size, 0o755
            # Byte code names the time of its source.
            info.mtime = int(path.stat().st_mtime)
            with path.open("rb") as file:
                tar.addfile(info, file)
    return packed.getvalue()


@contextmanager
def podman_service(folder: Path, agent: Path | None = None) -> Iterator[str]:
    """Yield the address of a podman that keeps everything in `folder` and has one image.

    `agent` is a virtual environment that the image has, see `image_tar`.
    """
    words = [
        *("podman", "--root", f"{folder}/storage", "--runroot", f"{folder}/run"),
        *("--cgroup-manager", "cgroupfs", "--storage-driver", "overlay", "--runtime", "runc"),
        *("--events-backend", "none"),
    ]
    packed = folder / "image.tar"
    packed.write_bytes(image_tar(agent))
    subprocess.run([*words, "import", packed, IMAGE], check=True, capture_output=True)
    socket = folder / "podman.sock"
    with (folder / "service.log").open("wb") as log:
        service = subprocess.Popen(
            [*words, "system", "service", "--time", "0", f"unix://{socket}"],
            # It leaves files where it stands when a container has no memory left.
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            ends_s = time.monotonic() + 60
            while not socket.exists():
                assert service.poll() is None, (folder / "service.log").read_text()
                assert time.monotonic() < ends_s, "podman did not begin to listen"
                time.sleep(0.05)
            yield f"unix://{socket}"
        finally:
            subprocess.run([*words, "rm", "--all", "--force"], check=False, capture_output=True)
            service.terminate()
            service.wait()
            # Podman keeps a process for each command for five minutes after its end.
            for pid in processes_of(str(folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run([*words, "system", "reset", "--force"], check=False, capture_output=True)
