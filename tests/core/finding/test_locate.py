"""What is said when an environment's module cannot be imported."""

import sys

import pytest

from telescope_core.errors import EnvironmentLoadError
from telescope_core.finding.locate import load_environment_class


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", ".")])
    return tmp_path


def test_a_module_of_this_folder_is_told_how_to_be_found(alone):
    (alone / "hedge_maze.py").write_text("")
    with pytest.raises(EnvironmentLoadError, match=r"PYTHONPATH=\."):
        load_environment_class("hedge_maze:Maze")


def test_a_module_that_is_nowhere_is_told_where_it_is_looked_for(alone):
    with pytest.raises(EnvironmentLoadError, match=r"'hedge_maze'"):
        load_environment_class("hedge_maze:Maze")


def test_a_module_that_misses_a_package_is_told_to_install_it(alone, monkeypatch):
    (alone / "hedge_maze.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(str(alone))
    with pytest.raises(EnvironmentLoadError) as refused:
        load_environment_class("hedge_maze:Maze")
    assert "'absent_package'" in str(refused.value)
