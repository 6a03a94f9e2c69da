"""Folders that an interrupted installation left: whatever is in them, they do not stop the next."""

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.install.data import (
    BUILDING,
    PART,
    remove_leftovers,
    remove_venv,
    venvs_folder,
    wheels_folder,
)
from telescope_envs.install.venv import clear_scratch
from telescope_envs.records.files import (
    files_below,
    remove_tree,
)

DEEP = 1500
NOBODY = 65534


def make_deep(top: Path, *, name: str = "a" * 20, depth: int = DEEP) -> None:
    """Make folders in folders; the path is far longer than the system takes at once."""
    top.mkdir(parents=True)
    here = os.open(top, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir(name, dir_fd=here)
            inner = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    finally:
        os.close(here)


@pytest.fixture
def place(tmp_path: Path) -> Generator[Path]:
    """A folder that is removed here: pytest's own removal fails on deep ones."""
    yield tmp_path / "place"
    assert remove_tree(tmp_path / "place")


@pytest.fixture
def anybodys() -> Generator[Path]:
    """A folder to work in as a user for whom the modes of files count: not as root."""
    # pytest's own folders let nobody but their owner through.
    folder = Path(tempfile.mkdtemp(prefix="telescope-anybody-"))
    user = os.geteuid()
    if user == 0:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(user)
        assert remove_tree(folder)


@pytest.mark.slow
def test_a_path_fifteen_hundred_folders_deep_is_removed(home: Path) -> None:
    for prefix in (BUILDING, ".removing-"):
        make_deep(venvs_folder() / f"{prefix}acme--toy")
    assert len(remove_leftovers()) == 2
    assert os.listdir(venvs_folder()) == []


def test_one_that_is_long_but_not_deep_is_removed_as_well(place: Path) -> None:
    make_deep(place, name="b" * 250, depth=40)
    assert remove_tree(place)
    assert not place.exists()


def test_links_are_removed_and_not_followed(place: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    place.mkdir()
    (place / "to-folder").symlink_to(kept)
    (place / "to-nothing").symlink_to("nothing")
    (place / "inner").mkdir()
    (place / "inner" / "to-file").symlink_to(kept / "file")
    os.mkfifo(place / "inner" / "fifo")
    assert remove_tree(place)
    assert (kept / "file").read_text() == "kept"
    (tmp_path / "link").symlink_to(kept)
    assert remove_tree(tmp_path / "link")
    assert (kept / "file").read_text() == "kept"
    assert remove_tree(tmp_path / "not-there")


def test_names_like_its_own_are_no_obstacle(place: Path) -> None:
    for name in ("0", "1", ".moved-0", ".moved-1"):
        (place / "inner" / name / "full").mkdir(parents=True)
        (place / name).parent.mkdir(exist_ok=True)
    for name in (".moved-0", ".moved-2"):
        (place / name).write_text("a file")
    assert remove_tree(place)


def test_folders_that_nobody_may_read_are_removed_by_their_owner(anybodys: Path) -> None:
    top = anybodys / "top"
    for mode in (0o000, 0o100, 0o500):
        inner = top / f"{mode:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text("x")
        inner.chmod(mode)
        inner.parent.chmod(mode)
    assert remove_tree(top)


def test_what_cannot_be_removed_stays_and_stops_nothing_else(
    anybodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELESCOPE_HOME", str(anybodys / "home"))
    stuck = venvs_folder() / f"{BUILDING}acme--stuck"
    other = wheels_folder() / f"{PART}acme--toy"
    for folder in (stuck, other, venvs_folder() / "acme--used--1"):
        (folder / "inner").mkdir(parents=True)
    venvs_folder().chmod(0o500)
    try:
        assert remove_leftovers() == [other]
        with pytest.raises(EnvironmentLoadError, match=r"stuck.* cannot be removed"):
            clear_scratch(stuck)
        assert not remove_venv(venvs_folder() / "acme--used--1", "acme/used")
    finally:
        venvs_folder().chmod(0o700)
    assert (venvs_folder() / "acme--used--1" / "inner").is_dir(), "nothing of it was removed"


@pytest.mark.slow
def test_files_below_are_found_at_any_depth(place: Path) -> None:
    make_deep(place, name="a", depth=1200)
    assert sum(1 for _ in files_below(place)) == 1200
    (place / "link").symlink_to(place)
    assert sum(1 for _ in files_below(place)) == 1201, "a link to a folder is one file"
