"""What `telescope env link SCHEME:ID` installs, and what it lets an environment read."""

import io
import os
import runpy
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from functools import partial
from importlib import import_module

import pytest
from tests.adapters.linking import telescope
from tests.envs.package_index import tiny_wheel
from tests.processes import Program

from telescope_adapters.frameworks import VERIFIERS, VERIFIERS_TASKS, missing_import
from telescope_adapters.gymnasium import GymEnvironment
from telescope_adapters.harbor import HarborEnvironment
from telescope_adapters.nemo_gym import NemoGymEnvironment
from telescope_adapters.openenv import OpenEnvEnvironment
from telescope_adapters.ors import OrsEnvironment
from telescope_adapters.settings import as_metrics, require_options, told_of_options
from telescope_cli.env.info import _settings_of
from telescope_core.base.code_places import is_authors, own_frame
from telescope_core.environments.building import check_names
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnknownNameError
from telescope_core.finding import schemes
from telescope_core.finding.locate import locate_environment
from telescope_core.finding.schemes import require_adapted
from telescope_core.open import open_environment
from telescope_envs.install import adapted
from telescope_envs.install.adapted import (
    environment_for,
    link_adapted,
    locate_adapted,
    unlink_adapted,
)
from telescope_envs.install.loading import asked
from telescope_envs.records.links import AdaptedLink, adapted_path

BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = "rivers-0.1.0.dist-info"
    files = {
        "rivers.py": open("rivers.py").read(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: rivers\\nVersion: 0.1.0\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    with zipfile.ZipFile(f"{folder}/rivers-0.1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\\n" for path in files))
    return "rivers-0.1.0-py3-none-any.whl"
"""
JUDGED = """
import os
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward
from telescope_core.errors import EnvironmentLoadError

class Judged(SingleTurnEnvironment):
    def __init__(self, config=None):
        super().__init__(config)
        if "JUDGE_KEY" not in os.environ:
            raise EnvironmentLoadError("it has no JUDGE_KEY")

    def examples(self, split):
        return ListSource([Example(id="x", prompt="x")])

    @reward
    def right(self, completion):
        return 1.0
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "rivers"
version = "0.1.0"
"""


def wheel_of(folder, text: str):
    """Write the wheel of rivers with `text` as its code, over one that is there."""
    folder.mkdir(exist_ok=True)
    path = folder / "rivers-0.1.0-py3-none-any.whl"
    path.write_bytes(tiny_wheel("rivers", "0.1.0", code=text))
    return path


def source_of(folder, text: str):
    """Write a project's folder that is built without any other package."""
    folder.mkdir(exist_ok=True)
    for name, content in {
        "backend.py": BACKEND,
        "pyproject.toml": PROJECT,
        "rivers.py": text,
    }.items():
        (folder / name).write_text(content)
    return folder


def sdist_of(folder, text: str):
    """Write the sdist of that project."""
    source = source_of(folder / "source", text)
    path = folder / "rivers-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(source.iterdir()):
            archive.add(file, f"rivers-0.1.0/{file.name}")
        info = tarfile.TarInfo("rivers-0.1.0/PKG-INFO")
        content = b"Metadata-Version: 2.1\nName: rivers\nVersion: 0.1.0\n"
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("write", [wheel_of, sdist_of, source_of])
def test_files_that_change_under_one_name_are_other_code(tmp_path, monkeypatch, write):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "a folder"
    folder.mkdir()
    found = []
    for text in ("NAME = 'Elbe'\n", "NAME = 'Oder'\n"):
        made = environment_for("gym", [str(write(folder, text))])
        [pin] = [one for one in made.pins if one.startswith("rivers==")]
        site = next((made.python.parents[1] / "lib").glob("*/site-packages"))
        found.append((pin, (site / "rivers.py").read_text()))
    assert [text for _, text in found] == ["NAME = 'Elbe'\n", "NAME = 'Oder'\n"]
    assert found[0][0] != found[1][0]
    assert all(pin.startswith("rivers==0.1.0+") for pin, _ in found)


@pytest.mark.slow
def test_a_folder_that_changed_leaves_what_others_play(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))

    def made_of(river: str):
        return environment_for("gym", [str(source_of(tmp_path / "rivers", f"NAME = {river!r}\n"))])

    def linked(made):
        link = AdaptedLink(
            name="gym:X", factory="a:B", interpreter=str(made.python), linked_at=datetime.now(UTC)
        )
        path = adapted_path(link.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(link.as_json())

    first = made_of("Elbe")
    linked(first)
    program = "import rivers\nprint(rivers.NAME, flush=True)\ninput()"
    with Program(
        [first.python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as playing:
        assert playing.stdout.readline() == "Elbe\n"
        second = made_of("Oder")
        assert made_of("Elbe").python == first.python
        assert not second.python.exists()  # nothing was linked to it, as after a wrong name
        second = made_of("Oder")
        linked(second)
        assert made_of("Oder").python == second.python
        assert first.python.exists()
        unlink_adapted("gym:X")
        assert not second.python.exists()
        assert first.python.exists()
        playing.communicate("\n")
    linked(made_of("Oder"))
    assert not first.python.exists()


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        (["./rivers-0.1.0-py3-none-any.whl"], "no such file"),
        (["git+https://127.0.0.1/rivers"], "name @ URL"),
        (["{folder}/rivers.whl"], "expected a wheel"),
        (["{folder}/rivers.txt"], "expected a wheel"),
        (["{folder}/empty/"], "pyproject.toml"),
        (["{folder}/unnamed"], "project.name"),
    ],
)
def test_what_names_no_package_is_refused_before_anything_is_installed(tmp_path, packages, said):
    for name in ("rivers.whl", "rivers.txt"):
        (tmp_path / name).write_text("")
    for name in ("empty", "unnamed"):
        (tmp_path / name).mkdir()
    (tmp_path / "unnamed" / "pyproject.toml").write_text("[tool.other]\n")
    with pytest.raises(ConfigError, match=said):
        link_adapted("gym:X", packages=[one.format(folder=tmp_path) for one in packages])


def test_secrets_are_named_and_set_before_anything_is_installed(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        link_adapted("gym:X", secrets=["JUDGE_KEY"])
    with pytest.raises(EnvironmentLoadError, match="TELESCOPE_TOKEN"):
        link_adapted("gym:X", secrets=["TELESCOPE_TOKEN"])
    monkeypatch.setenv("JUDGE_KEY", "k")
    with pytest.raises(ConfigError, match="elsewhere"):
        link_adapted("openenv:http://127.0.0.1:1", secrets=["JUDGE_KEY"])


def test_a_link_says_which_variables_its_environment_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path))
    link = AdaptedLink(
        name="gym:X",
        factory="a:B",
        interpreter="",
        linked_at=datetime.now(UTC),
        secrets=("JUDGE_KEY",),
    )
    path = adapted_path("gym:X")
    path.parent.mkdir(parents=True)
    path.write_bytes(link.as_json())
    location = locate_adapted("gym:X")
    assert location.secrets == ("JUDGE_KEY",)
    path.write_bytes(link.changed(secrets=()).as_json())
    assert locate_adapted("gym:X").secrets == ()
    assert locate_adapted("gym:X").lock_digest != location.lock_digest
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        open_environment("gym:X", location=location)


@pytest.mark.slow
def test_a_link_is_tried_with_what_workers_see_and_shows_its_own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "/caches")
    monkeypatch.setenv("JUDGE_KEY", "k")
    seen = {}
    monkeypatch.setattr(adapted, "asked", lambda *_, variables, **__: seen.update(variables))
    name = "openenv:http://127.0.0.1:1"
    link_adapted(name, settings={"reward_max": 2})
    assert (seen["HF_HOME"], seen["HOME"]) == ("/caches", os.environ["HOME"])
    assert "JUDGE_KEY" not in seen
    shown = {one.name: one.default for one in _settings_of(locate_adapted(name))}
    assert shown["reward_max"] == "2"
    assert shown["id"] == '"http://127.0.0.1:1"'
    assert shown["reward_min"] == "0.0"


@pytest.mark.slow
def test_what_tries_a_link_reads_the_variables_that_were_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    (tmp_path / "judged.py").write_text(JUDGED)
    asking = partial(asked, "built", "judged:Judged", search_path=[str(tmp_path)], what="it")
    asking(variables={"JUDGE_KEY": "k"})
    with pytest.raises(EnvironmentLoadError, match="it has no JUDGE_KEY"):
        asking()


@pytest.mark.slow
def test_options_of_frameworks_are_refused_for_folders(tmp_path):
    done = telescope("env", "link", str(tmp_path), "--secret", "PATH")
    assert done.returncode == 2
    assert "--secret" in done.stderr


def test_a_missing_module_is_named_with_who_imports_it(tmp_path, monkeypatch):
    (tmp_path / "old_rivers.py").write_text("import os\nimport verifiers.no_such_part\n")
    (tmp_path / "new_rivers.py").write_text("import no_such_package\n")
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)

    def said_of(module: str) -> str:
        try:
            try:
                import_module(module)
            except ImportError as error:
                raise ValueError("it cannot be loaded") from error
        except ValueError as error:
            return missing_import(error, VERIFIERS_TASKS, otherwise=VERIFIERS)
        raise AssertionError

    old = said_of("old_rivers")
    assert "old_rivers.py, line 2: No module named 'verifiers.no_such_part'" in old
    assert "--with verifiers==0.3.1" in old
    new = said_of("new_rivers")
    assert "new_rivers.py, line 1: No module named 'no_such_package'" in new
    assert "--with PACKAGE" in new
    (tmp_path / "odd_rivers.py").write_text("from httpx import no_such_name")
    odd = said_of("odd_rivers")
    assert "cannot import name 'no_such_name' from 'httpx'" in odd
    assert "another version of httpx" in odd
    assert missing_import(ValueError("x"), VERIFIERS) == ""


def test_old_versions_of_verifiers_are_played():
    found = require_adapted("verifiers:x")
    factories = {
        version: one
        for version in ("0.1.8.post2", "0.3.1", "0.4.0")
        if (one := found.fitting(version))
    }
    assert [one.pin for one in factories.values()] == ["0.3.1", "0.3.1", "0.4.0"]
    assert found.fitting("0.1.7") is None


def test_what_is_linked_needs_the_package_that_plays_it(monkeypatch):
    monkeypatch.setattr("telescope_core.finding.schemes.entry_points", lambda group: [])
    with pytest.raises(ConfigError, match="pip install telescope-adapters"):
        locate_environment("gym:FrozenLake-v1")
    with pytest.raises(UnknownNameError, match="gym"):
        schemes.require_adapted("gmy:FrozenLake-v1")


def test_a_link_to_an_adapter_that_moved_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path))
    link = AdaptedLink(
        name="gym:X",
        factory="telescope_core.adapters.gymnasium:GymEnvironment",
        interpreter="",
        linked_at=datetime.now(UTC),
    )
    path = adapted_path("gym:X")
    path.parent.mkdir(parents=True)
    path.write_bytes(link.as_json())
    with pytest.raises(EnvironmentLoadError, match="telescope env link gym:X"):
        locate_adapted("gym:X")


def test_addresses_of_the_time_before_the_package_hand_on(monkeypatch, capsys):
    old = import_module("telescope_core.adapters.verifiers_served")
    new = import_module("telescope_adapters.serving.verifiers_served")
    assert old.verifiers_environment is new.verifiers_environment
    program = "telescope_core.adapters.openenv_server"
    monkeypatch.delitem(sys.modules, program, raising=False)
    monkeypatch.setattr(sys, "argv", ["openenv_server", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__")
    assert ended.value.code == 0
    assert "--max-sessions" in capsys.readouterr().out
    monkeypatch.setattr("telescope_core.adapters.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install telescope-adapters"):
        runpy.run_module(program, run_name="__main__")
    with pytest.raises(EnvironmentLoadError, match="pip install telescope-adapters"):
        old.telescope_reward  # noqa: B018


@pytest.mark.parametrize("kind", [OpenEnvEnvironment, NemoGymEnvironment, OrsEnvironment])
def test_what_a_server_plays_takes_no_arguments_here(kind):
    with pytest.raises(ConfigError, match=r"env\.options"):
        kind.from_settings({"id": "http://127.0.0.1:1", "options": {"size": 3}})
    with pytest.raises(EnvironmentLoadError, match=f"{kind.scheme}:http"):
        kind.from_settings({"id": "127.0.0.1:1"})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GymEnvironment, "max_turns", 0),
        (NemoGymEnvironment, "max_turns", 0),
        (OrsEnvironment, "max_turns", 0),
        (OpenEnvEnvironment, "max_turns", -1),
        (OpenEnvEnvironment, "max_sessions", 0),
        (HarborEnvironment, "cpus", 0),
        (HarborEnvironment, "memory_mb", -1),
    ],
)
def test_limits_that_nothing_can_meet_are_refused(kind, name, value):
    with pytest.raises(ConfigError, match=name):
        kind.from_settings({"id": "http://127.0.0.1:1", name: value})


def test_adapters_are_not_judged_as_code_of_authors():
    assert not is_authors(GymEnvironment.check_range)
    check_names(GymEnvironment, where="it")
    with pytest.raises(AttributeError) as caught:
        as_metrics(None, of="it")
    assert own_frame(caught.value).filename == __file__


def needs_level(level, name="a"):
    return level, name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "'level'; it takes level, name; set it in env.options"),
        ({"level": 1, "nam": 2}, "'nam'; did you mean 'name'?"),
        ({"level": 1, "other": 2}, "'other'; it takes level, name; correct env.options"),
    ],
)
def test_arguments_that_are_missing_or_unknown_are_named(options, said):
    with pytest.raises(ConfigError, match="rivers: ") as caught:
        require_options(needs_level, options, of="rivers")
    assert said in str(caught.value)
    with (
        pytest.raises(ConfigError, match="rivers cannot be made") as caught,
        told_of_options("rivers"),
    ):
        needs_level(**options)
    assert "env.options" in str(caught.value)


def test_other_errors_of_types_are_left_as_they_are():
    require_options(needs_level, {"level": 1}, of="rivers")
    with pytest.raises(TypeError, match="unsupported operand"), told_of_options("rivers"):
        _ = 1 + "a"
