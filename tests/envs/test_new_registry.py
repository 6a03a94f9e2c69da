"""Beginning a registry, and publishing the first-party environments into one."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_cli.main import main
from telescope_envs.registry import Registry

COUNTDOWN = Path(__file__).parents[2] / "packages/telescope-envs/environments/countdown"


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["hub", *words])
    return ended.value.code


def test_a_new_registry_is_published_to_and_keeps_every_rule(tmp_path, capsys):
    folder = tmp_path / "registry"
    assert run("init", str(folder), "--owner", "acme", "--owner", "corp") == 0
    assert "to which acme, corp may publish" in capsys.readouterr().out
    registry = Registry.at(folder)
    assert registry.config.name == "registry"
    assert registry.store.publish(toy_publication())
    assert run("check", str(folder)) == 0


@pytest.mark.parametrize(
    ("owner", "message"),
    [("Acme Inc", "owner 'Acme Inc' must have"), ("../acme", "must have")],
)
def test_an_owner_that_cannot_be_one_leaves_nothing(tmp_path, owner, message, capsys):
    assert run("init", str(tmp_path / "registry"), "--owner", owner) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "registry").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert run("init", str(tmp_path), "--owner", "acme") == 2
    assert "already exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_first_party_releases_carry_their_validation(tmp_path):
    assert run("init", str(tmp_path / "registry"), "--owner", "telescope") == 0
    command = [
        sys.executable,
        "-m",
        "telescope_envs.publish.first_party",
        str(tmp_path / "registry"),
    ]
    subprocess.run([*command, str(COUNTDOWN)], check=True, timeout=120)
    (release,) = Registry.at(tmp_path / "registry").releases("telescope/countdown")
    assert (release.validation.verdict, len(release.validation.report_sha256)) == ("pass", 64)
    assert release.source.subdirectory.endswith("environments/countdown")
    assert release.source.commit == ""
