"""`telescope agent`: what is known, what is installed, and what is told when it cannot be."""

import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from telescope_cli.agent import app
from telescope_core.errors import EnvironmentLoadError, UnknownNameError
from telescope_core.harnesses import harness_names
from telescope_core.harnesses.installed import (
    COMPLETE,
    VARIABLE,
    agents_folder,
    open_harness,
    require_installed,
    require_readable,
)
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_envs.install.agents import agent_states


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """A folder that every user can read, as that of root's agents must be."""
    with tempfile.TemporaryDirectory(prefix="telescope-agents-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv(VARIABLE, folder)
        yield Path(folder)


def ran(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.mark.slow
def test_every_harness_is_listed_with_what_it_needs():
    rows = json.loads(ran("list", "--json").stdout)
    assert [row["name"] for row in rows] == harness_names()
    assert {row["name"]: row["installed"] for row in rows} == {
        "command": True,
        "mini-swe-agent": False,
        "openai-agents": False,
        "shell-agent": True,
        "terminal": True,
    }
    assert "openai-agents==" in ran("list").stdout
    assert "not installed" in ran("list").stdout


def test_one_without_packages_needs_no_installation(place):
    row = json.loads(ran("install", "command", "--json").stdout)
    assert row == {"name": "command", "requirements": [], "installed": True, "folder": ""}
    assert ran("install", "command").exit_code == 0
    assert list(place.iterdir()) == []


def test_an_unknown_one_is_refused_with_the_nearest(place):
    for verb in ("install", "uninstall"):
        done = ran(verb, "mini-swe")
        assert isinstance(done.exception, UnknownNameError)
        assert "'mini-swe-agent'" in str(done.exception)
    done = ran("uninstall", "mini-swe-agent")
    assert isinstance(done.exception, UnknownNameError)
    assert "telescope agent list" in str(done.exception)
    assert list(place.iterdir()) == []


def test_what_is_not_whole_is_not_installed_and_is_removed(place):
    [state] = [one for one in agent_states() if one.name == "openai-agents"]
    assert state.folder.parent == place == agents_folder()
    state.folder.mkdir()
    harness, interpreter = open_harness("openai-agents"), find_interpreter().path
    with pytest.raises(EnvironmentLoadError, match="telescope agent install openai-agents"):
        require_installed(harness, interpreter)
    (state.folder / COMPLETE).write_text("")
    assert require_installed(harness, interpreter) == state.folder
    assert "is removed" in ran("uninstall", "openai-agents").stdout
    assert not state.folder.exists()


def test_root_refuses_a_folder_that_its_sandboxes_cannot_read(place, monkeypatch):
    require_readable(place / "agents")
    place.chmod(0o700)
    refused = pytest.raises(EnvironmentLoadError, match=rf"{place} is closed.*{VARIABLE}")
    # Sandboxes of an ordinary user run as that user.
    with refused if os.getuid() == 0 else nullcontext():
        require_readable(place / "agents")
    assert list(place.iterdir()) == []
