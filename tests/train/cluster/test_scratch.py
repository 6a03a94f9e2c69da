"""Temporary folders of processes: they end with them, and killed ones leave theirs to the next."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes import Program

from telescope_train.cluster.leftovers import ScratchFolder

LIMIT_S = 60.0
PROGRAM = """
import sys, time
from telescope_train.cluster.leftovers import ScratchFolder
folder = ScratchFolder("a-", max_parent_bytes=60)
(folder.path / "file").write_text("data")
if sys.argv[1] == "left":
    folder.leave()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def made(prefix: str = "a-") -> Path:
    folder = ScratchFolder(prefix, max_parent_bytes=60)
    folder.remove()
    return folder.path


@pytest.mark.parametrize("ending", ["killed", "left"])
def test_only_the_folder_of_a_killed_process_is_deleted(temporary: Path, ending: str) -> None:
    command = [sys.executable, "-c", PROGRAM, ending]
    with Program(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent == temporary
        assert path.stat().st_mode & 0o777 == 0o700
        made()
        assert (path / "file").read_text() == "data", "its process lives"
        process.kill()
    made("b-")
    assert path.is_dir(), "others of another kind leave it alone"
    made()
    assert path.is_dir() == (ending == "left")


def test_a_folder_is_gone_with_all_that_is_in_it(temporary: Path) -> None:
    folder = ScratchFolder("a-", max_parent_bytes=60)
    (folder.path / "deeper").mkdir()
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("parent", ["/somewhere/" + "deep/" * 20, "/t/" + "\u00fc" * 8])
def test_a_long_path_of_temporary_files_is_not_used(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: parent)
    folder = ScratchFolder("a-", max_parent_bytes=16)
    folder.remove()
    assert folder.path.parent == Path("/tmp")
