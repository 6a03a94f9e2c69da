"""Environments, evals, the Hub and the pages use nothing that Python has on Linux alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.macos import MODULES, like_macos, linux_only

ROOT = Path(__file__).parents[2]
ON_ANY = ("core", "adapters", "envs", "cli", "ui")
"""Packages of `make setup-light`, which macOS has too."""
ON_LINUX = {
    "telescope_core/base/first_process.py": "the first process of a container is on Linux",
    "telescope_core/probes/meter.py": "macOS has no such clock, and is asked before",
    "telescope_core/sandboxes/local/": "the provider refuses other systems before",
}
"""Files and folders that use such names, and why nothing on macOS comes to them."""


def uses(path: Path) -> Iterator[str]:
    """Yield the names of MODULES that a file uses as attributes, such as os.pipe2."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id.lstrip('_')}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"{node.module}.{one.name}" for one in node.names)


def test_what_linux_has_alone_is_known():
    assert {"os.pipe2", "os.memfd_create", "signal.sigwaitinfo", "socket.SO_PEERCRED"} <= (
        linux_only()
    )
    assert not {"os.fork", "signal.SIGKILL", "socket.AF_UNIX", "time.monotonic"} & linux_only()


def test_only_named_files_use_what_linux_has_alone():
    left, unused = {}, set(ON_LINUX)
    for package in ON_ANY:
        source = ROOT / f"packages/telescope-{package}/src"
        for path in source.rglob("*.py"):
            if names := linux_only() & set(uses(path)):
                place = path.relative_to(source).as_posix()
                known = {one for one in ON_LINUX if place.startswith(one)}
                unused -= known
                if not known:
                    left[place] = sorted(names)
    assert (left, unused) == ({}, set())


def run_like_macos(code: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=like_macos(folder / "macos"),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_can_be_made_to_lack_it(tmp_path):
    """So that the circle of the registries is walked as on macOS, which nothing here is."""
    code = """
import os, signal, sys
from telescope_core.base import process_facts
print(sys.platform, hasattr(os, "pipe2"), hasattr(signal, "sigwaitinfo"), os.path.exists("/proc"))
print(repr(process_facts.process_started(os.getpid())), process_facts.resident_bytes() > 0)
process_facts.limit_addresses(2**32, 2**32)
"""
    done = run_like_macos(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "darwin False False True\n'' True\n"


def test_a_worker_that_ends_by_itself_keeps_its_exit_code_there(tmp_path):
    """macOS refuses to signal a group of which only its ended leader is left."""
    code = """
import os
from telescope_core.environments.running import Notes
from telescope_core.processes.watch import go_on_in_kept_child
guard, _ = os.pipe()
go_on_in_kept_child(guard, os.dup(1), Notes())
os._exit(7)
"""
    done = run_like_macos(code, tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
