"""The tutorial of publishing is run as it is written; files that the how-to shows are read."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from telescope_envs.records.model import converted
from telescope_envs.records.release import Namespace
from telescope_envs.registry import Registry
from telescope_envs.registry.config import (
    AttestationMode,
    parse_user_config,
)

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "tutorials/publish-your-first-environment.md").read_text(encoding="utf-8")
CI = (DOCS / "how-to/publish-from-ci.md").read_text(encoding="utf-8")
TOKENS = {"TELESCOPE_REGISTRY", "TELESCOPE_HUB_TOKEN"}


def shown(name):
    (text,) = re.findall(rf'```text title="{re.escape(name)}"\n(.*?)```', CI, re.DOTALL)
    return text


@pytest.mark.slow
def test_the_commands_of_the_tutorial(tmp_path):
    blocks = re.findall(r"```sh\n(.*?)```", TUTORIAL, re.DOTALL)
    (tmp_path / "work").mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in TOKENS}
    environ |= {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME",)}
    environ |= {f"GIT_{who}_EMAIL": "a@example.org" for who in ("AUTHOR", "COMMITTER")}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TELESCOPE_HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    done = subprocess.run(
        ["bash", "-ec", "".join(blocks)],
        cwd=tmp_path / "work",
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme/sort-words 0.1.0: would be published" in done.stdout
    registry = Registry.at(tmp_path / "work/registry")
    assert [one.version for one in registry.releases("acme/sort-words")] == ["0.1.0", "0.2.0"]
    assert registry.status("acme/sort-words").yanked == {"0.1.0": "too easy"}


def test_the_files_of_the_how_to_say_what_they_should():
    namespace = converted(Namespace, tomllib.loads(shown("namespaces/acme.toml")))
    assert namespace.publishers[0].workflow == "environment.yml"
    config = parse_user_config(tomllib.loads(shown("config.toml")))
    assert config.attestations is AttestationMode.WHEN_PRESENT
    assert config.registries["corp"].attestations is AttestationMode.REQUIRED


def test_only_the_job_that_publishes_has_an_identity_and_secrets():
    jobs = yaml.safe_load(shown("environment.yml"))["jobs"]
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "tags" in jobs["publish"]["if"]
    assert "permissions" not in jobs["validate"]
    assert "secrets." not in str(jobs["validate"])
    checks = yaml.safe_load(shown("registry.yml"))["jobs"]["check"]["steps"]
    assert "telescope hub check" in checks[-1]["run"]
