"""Environments in virtual environments of their own: what is in them, and who plays there."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from telescope_envs.publish.first_party import publish

pytestmark = pytest.mark.slow
PLAY = """
import asyncio, importlib.util, json, sys
from telescope_core.open import open_environment
from telescope_core.finding.locate import locate_environment
from telescope_core.scripted import ScriptedClient
from telescope_core.protocols import PlayRequest
from telescope_core.types import Sampling, Split

async def main():
    client = open_environment("toy")
    request = PlayRequest(split=Split.TRAIN, example_index=0, group_id="g", index=0,
                          sampling=Sampling(max_tokens=4), deadline_s=30)
    rollout = await client.play(request, ScriptedClient(["yes"]).policy("r"))
    about = await client.describe()
    await client.close()
    return rollout, about

rollout, about = asyncio.run(main())
print(json.dumps({
    "reward": rollout.reward,
    "error": rollout.error,
    "tags": dict(rollout.tags),
    "version": about.version,
    "interpreter": locate_environment("toy").interpreter,
    "here": importlib.util.find_spec("telescope_env_acme_toy") is not None,
}))
"""
NUM_ENTERED = 24
ENTERED = """
import json, pathlib, sys, threading
import telescope_envs
from telescope_cli.main import main

inside = pathlib.Path(telescope_envs.__file__).parent
entered = set()

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event != "call" or name in entered or not name.startswith(str(inside)):
        return
    outer = frame
    while outer is not None:
        if outer.f_code.co_name == "<module>" and outer.f_code.co_filename != "<string>":
            return  # what a module does when it is imported
        outer = outer.f_back
    entered.add(name)

threading.setprofile(note)
sys.setprofile(note)
try:
    main(sys.argv[1:])
finally:
    sys.setprofile(None)
    names = sorted(str(pathlib.Path(name).relative_to(inside)) for name in entered)
    pathlib.Path("entered.json").write_text(json.dumps(names))
"""
TOY = '''"""A toy that says where it is."""

import importlib.util
import sys

from telescope_core import EnvironmentConfig, Example, ListSource, SingleTurnEnvironment, reward


class Toy(SingleTurnEnvironment):
    """Says yes."""

    class Config(EnvironmentConfig):
        size: int = 3
        """How many."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-0", prompt="yes?")])

    async def play(self, episode):
        episode.tags["prefix"] = sys.prefix
        found = [name for name in ("telescope_cli", "torch") if importlib.util.find_spec(name)]
        episode.tags["found"] = " ".join(found)
        return await super().play(episode)

    @reward
    def yes(self, rollout, example):
        return float(rollout.completion_text == "yes")
'''


@pytest.fixture
def telescope(fresh_python, tmp_path):
    """Run `telescope`, or a program, in a fresh environment with the real cache of packages."""

    def run(*arguments: str, program: str = ""):
        code = program or "from telescope_cli.main import main; main()"
        return subprocess.run(
            [fresh_python, "-c", code, *arguments],
            env={**os.environ, "TELESCOPE_REGISTRY": str(tmp_path / "registry")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    yield run
    run("env", "uninstall", "acme/toy")


@pytest.fixture
def played(registry, make_project, telescope):
    """Install the toy with the given flags; returns a function that plays one rollout of it."""
    publish(registry.store, make_project(code=TOY), owner="acme", datasets=[])

    def play(*flags: str, program: str = "") -> dict:
        done = telescope("env", "install", "toy", *flags, program=program)
        assert done.returncode == 0, done.stderr
        ran = telescope(program=PLAY)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return play


def test_an_isolated_environment_plays_in_its_own_interpreter(
    played, telescope, fresh_python, registry, tmp_path
):
    (release,) = registry.releases("acme/toy")
    assert [one.as_table() for one in release.settings] == [
        {"name": "size", "type": "integer", "default": "3", "help": "How many."}
    ]
    found = played(program=ENTERED)
    entered = json.loads((tmp_path / "entered.json").read_text())
    assert "install/pipeline.py" in entered
    assert len(entered) <= NUM_ENTERED, "\n".join(("env install enters:", *entered))
    venv = Path(found["interpreter"]).parents[1]
    assert venv.parent == Path(fresh_python).parents[1] / "share" / "telescope" / "venvs"
    assert (found["reward"], found["error"], found["version"]) == (1.0, None, "0.1.0")
    assert Path(found["tags"]["prefix"]) == venv
    assert found["tags"]["found"] == "", "only core and the environment are in there"
    assert not found["here"], "the interpreter of the host has no part of it"
    listed = json.loads(telescope("env", "list", "--installed", "--json").stdout)
    assert {"acme/toy": "0.1.0"}.items() <= {row["id"]: row["installed"] for row in listed}.items()
    assert "already installed" in telescope("env", "install", "toy").stdout
    assert telescope("env", "uninstall", "toy").returncode == 0
    assert not venv.exists()


def test_one_install_takes_the_place_of_the_other(played):
    venv = Path(played()["interpreter"]).parents[1]
    shared = played("--shared")
    assert shared["here"]
    assert not venv.exists()
    assert (shared["reward"], shared["tags"]["prefix"] == str(venv)) == (1.0, False)
    isolated = played()
    assert not isolated["here"]
    assert venv.exists()


def test_a_failed_build_leaves_nothing(registry, make_project, telescope, fresh_python):
    publish(
        registry.store,
        make_project(needs=("no-such-package-of-telescope",)),
        owner="acme",
        datasets=[],
    )
    done = telescope("env", "install", "toy")
    assert done.returncode == 3
    assert "the dependencies of acme/toy 0.1.0 cannot be locked" in done.stderr
    assert "no-such-package-of-telescope" in done.stderr
    venvs = Path(fresh_python).parents[1] / "share" / "telescope" / "venvs"
    assert list(venvs.glob("*")) == []
