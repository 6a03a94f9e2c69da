"""`telescope env validate`: what it takes, what it prints, how it ends."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.envs.projects import write_project
from typer.testing import CliRunner

from telescope_cli.env import push as push_module
from telescope_cli.env import validate as validate_module
from telescope_cli.env.app import app
from telescope_core.errors import ConfigError
from telescope_envs.records.files import write_atomically
from telescope_envs.records.links import AdaptedLink, adapted_path
from telescope_envs.validation import (
    Evidence,
    Level,
    Outcome,
    Report,
    ValidationOptions,
    Verdict,
)

RUN = CliRunner()
STATIC = ValidationOptions(level=Level.STATIC)


def validate(*arguments: str):
    done = RUN.invoke(app, ["validate", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def project(tmp_path) -> Path:
    folder = write_project(tmp_path / "toy", needs=("telescope-core>=0.1,<0.2",))
    (folder / "README.md").write_text("# Toy\n\nAsks for yes, and pays 1 for it. " * 5)
    about = folder / "pyproject.toml"
    about.write_text(about.read_text().replace("[project]\n", '[project]\nreadme = "README.md"\n'))
    return folder


def shown(project: Path, monkeypatch, outcome: Outcome, verdict: Verdict, **found: object) -> None:
    """Let the next validation of `project` end with this outcome of reward.has_gold."""
    made = validate_module.validate_subject(validate_module.subject_of(str(project)), STATIC)
    checks = tuple(
        one.model_copy(update={"outcome": outcome, **found}) if one.id == "reward.has_gold" else one
        for one in made.checks
    )
    changed = made.model_copy(update={"checks": checks, "verdict": verdict})
    monkeypatch.setattr(validate_module, "validate_subject", lambda *given: changed)


@pytest.mark.slow
def test_a_readable_report_in_80_columns_and_exit_0(project):
    done = validate(str(project), "--level", "static")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "acme/toy 0.1.0: pass" in done.stdout
    assert "static checks" in done.stderr


@pytest.mark.slow
def test_a_warning_is_shown_and_strict_makes_it_fail(project, monkeypatch):
    evidence = (Evidence(text="gold_answer returns None for every example tried"),)
    shown(project, monkeypatch, Outcome.WARN, Verdict.WARN, evidence=evidence, fix="Define it.")
    done = validate(str(project))
    assert done.exit_code == 0
    assert "acme/toy 0.1.0: warn" in done.stdout
    assert "reward.has_gold: warn" in done.stdout
    assert "fix: Define it." in done.stdout
    done = validate(str(project), "--json", "--strict")
    assert Report.model_validate_json(done.stdout).environment == "acme/toy"
    assert done.exit_code == 1


@pytest.mark.slow
def test_a_failure_is_exit_code_1_and_stands_in_the_report_file(project, tmp_path):
    about = project / "pyproject.toml"
    about.write_text(about.read_text().replace('license = "MIT"\n', ""))
    path = tmp_path / "reports" / "report.json"
    done = validate(str(project), "--level", "static", "--report", str(path))
    assert done.exit_code == 1
    written = Report.model_validate_json(path.read_bytes())
    assert written.verdict is Verdict.FAIL
    assert [check.id for check in written.found(Outcome.FAIL)] == ["static.metadata"]


def test_a_report_that_is_not_conclusive_is_exit_code_8_and_says_what_to_do(project, monkeypatch):
    reason = "only 3 of 36 tried"
    shown(project, monkeypatch, Outcome.INCONCLUSIVE, Verdict.INCONCLUSIVE, reason=reason)
    done = validate(str(project))
    assert done.exit_code == 8
    assert "acme/toy 0.1.0: not conclusive" in done.stdout
    assert "only 3 of 36 tried" in done.stdout
    assert "Validate it again when the machine is less busy" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nothing-here"], "nothing-here"),
        (["cuontdown"], "environment 'cuontdown'.*project"),
        (["toy.whl"], r"toy\.whl"),
        ([".", "--level", "statik"], "'static'"),
        ([".", "--report", "report.pdf"], r"\.json .*\.md"),
    ],
)
def test_wrong_input_is_one_clear_message(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as refusal:
        validate(*arguments)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_project_says_where_one_is(project, tmp_path):
    with pytest.raises(ConfigError, match=r"pyproject\.toml.* toy$") as refusal:
        validate(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    ("command", "name", "instead"),
    [
        ("validate", "gym:FrozenLake-v1", "telescope eval gym:FrozenLake-v1"),
        ("check-grader", "gym:FrozenLake-v1", "telescope eval gym:FrozenLake-v1"),
        # Without a Python of its own, it would be taken for the project in the working directory.
        ("validate", "openenv:http://127.0.0.1:1", "telescope eval openenv:"),
        ("check-grader", "harbor:tasks", "telescope env validate harbor:tasks"),
    ],
)
def test_an_environment_of_another_framework_has_no_package_to_check(
    command, name, instead, tmp_path, monkeypatch
):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path))
    link = AdaptedLink(name=name, factory="a:B", interpreter="", linked_at=datetime.now(UTC))
    write_atomically(adapted_path(name), link.as_json())
    done = RUN.invoke(app, [command, name])
    assert isinstance(done.exception, ConfigError)
    assert instead in str(done.exception)


@pytest.mark.parametrize(
    ("module", "called", "command"),
    [
        (validate_module, "validate_subject", ["validate"]),
        (validate_module, "report_of_grader", ["check-grader"]),
        (push_module, "push_project", ["push", "--yes"]),
    ],
)
def test_settings_of_the_environment_are_given_as_for_an_eval(
    module, called, command, project, monkeypatch
):
    class ReachedError(Exception):
        pass

    def reached(_subject, options):
        raise ReachedError(dict(options.settings))

    monkeypatch.setattr(module, called, reached)
    done = RUN.invoke(
        app, [*command, str(project), "--env.judge.base_url", "http://x", "--env.n=2"]
    )
    assert isinstance(done.exception, ReachedError), done.output
    assert done.exception.args == ({"judge": {"base_url": "http://x"}, "n": "2"},)
    for wrong, message in (("--exampels", "--exampl?es|option '--exampels'"), ("other", "'other'")):
        refused = RUN.invoke(app, [*command, str(project), wrong])
        assert re.search(message, str(refused.exception))
