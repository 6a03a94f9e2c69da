from importlib import metadata
from pathlib import Path

import pytest

from telescope_core.base.entry_points import entry_points
from telescope_core.finding.schemes import schemes

GROUP = "telescope.tests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that were asked of the standard library."""
    asked: list[str] = []
    read = metadata.entry_points

    def noted(*, group: str) -> metadata.EntryPoints:
        asked.append(group)
        return read(group=group)

    monkeypatch.setattr(metadata, "entry_points", noted)
    return asked


def install(folder: Path, name: str, group: str = GROUP) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = a.module:Thing\nboth = b:{name}\n")


@pytest.mark.parametrize("group", ["telescope.backends", "console_scripts", "nobody.has.this"])
def test_they_are_those_of_the_standard_library(group: str) -> None:
    expected = metadata.entry_points(group=group)
    assert set(entry_points(group=group)) == set(expected)
    assert entry_points(group=group).names == expected.names


def test_packages_are_read_once_until_one_comes_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    install(tmp_path / "before", "first")
    monkeypatch.syspath_prepend(tmp_path / "before")
    for _ in range(3):
        assert entry_points(group=GROUP).names == {"first", "both"}
    assert reads == [GROUP]

    install(tmp_path / "after", "second")
    monkeypatch.syspath_prepend(tmp_path / "after")
    assert entry_points(group=GROUP).names == {"first", "second", "both"}
    assert [one.value for one in entry_points(group=GROUP, name="second")] == ["a.module:Thing"]
    assert not entry_points(group=GROUP, name="third")
    assert len(reads) == 2

    (tmp_path / "after" / "second-1.0.dist-info").rename(tmp_path / "gone")
    assert entry_points(group=GROUP).names == {"first", "both"}


def test_a_working_directory_on_the_import_path_is_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "here")
    monkeypatch.syspath_prepend("")
    assert "here" not in entry_points(group=GROUP).names
    monkeypatch.chdir(tmp_path)
    assert "here" in entry_points(group=GROUP).names


def test_a_working_directory_that_is_gone_holds_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(gone)
    gone.rmdir()
    expected = metadata.entry_points(group="telescope.adapters").names
    assert entry_points(group="telescope.adapters").names == expected


def test_an_adapter_counts_once_its_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "somegame" not in schemes()
    install(tmp_path, "somegame", group="telescope.adapters")
    assert "somegame" in schemes()
