"""New projects: what is written, what is refused, and that each works as it is generated."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from telescope_cli.main import main
from telescope_core.errors import ConfigError, UnknownNameError
from telescope_envs.publish.build import build_and_inspect
from telescope_envs.publish.scaffold import (
    TEMPLATES,
    class_name,
    create_project,
    render,
)
from telescope_envs.validation import ValidationOptions, Verdict, validate_project


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["env", *words])
    return ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    # The tutorial of publishing, which test_publishing_docs runs, does the same with the first.
    [
        pytest.param("single-turn", marks=pytest.mark.nightly),
        *sorted({*TEMPLATES} - {"single-turn"}),
    ],
)
def test_a_new_project_passes_its_own_tests_and_validation(template, tmp_path, fresh_python):
    made = create_project(tmp_path / "new", owner="acme", name="first-one", template=template)
    done = subprocess.run(
        [fresh_python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=made.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = validate_project(made.folder, ValidationOptions(num_examples=4))
    found = [check for check in report.checks if check.evidence]
    assert report.verdict is Verdict.PASS, found


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_builds_and_holds_what_a_project_has(template, tmp_path):
    made = create_project(tmp_path / "new", owner="acme", name="first-one", template=template)
    expected = {".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
    assert expected <= set(made.files)
    texts = [(made.folder / name).read_text() for name in made.files]
    assert not [text for text in texts if re.search(r"\{\{\w+\}\}", text)]
    built = build_and_inspect(made.folder, tmp_path / "dist")
    assert built.contents.distribution == "telescope-env-acme-first-one"
    assert built.contents.factory == made.factory == "telescope_env_acme_first_one:FirstOne"
    assert built.contents.requires_dist == ("telescope-core<0.2,>=0.1",)
    assert built.contents.license == "MIT"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sort-words", "SortWords"),
        ("24-game", "Task24Game"),
        ("none", "NoneTask"),
        ("example", "ExampleTask"),
        ("exception", "ExceptionTask"),
        ("config", "ConfigTask"),
    ],
)
def test_a_class_is_called_like_nothing_else_in_its_file(name, expected):
    assert class_name(name) == expected


def test_what_is_filled_in_is_not_filled_in_again():
    assert render("{{a}} {{b}}", {"a": "{{b}}", "b": "x"}) == "{{b}} x"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"template": "single"}, UnknownNameError, "did you mean 'single-turn'"),
        ({"name": "Sort_Words"}, ConfigError, "'Sort_Words' must have 2 .*try 'sort-words'"),
        ({"name": "\u00fcn\u00efcode-\u00c5"}, ConfigError, "try 'unicode-a'"),
        ({"name": "../up"}, ConfigError, "must have .*try 'up'"),
        ({"owner": "a"}, ConfigError, "owner 'a' must have 3 to 39"),
    ],
)
def test_what_cannot_be_a_project_is_refused_and_nothing_is_written(
    change, error, message, tmp_path
):
    wanted = {"owner": "acme", "name": "new", "template": "tools", **change}
    with pytest.raises(error, match=message):
        create_project(tmp_path / "new", **wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match="already exists and is not empty; give another folder: --dir"
    ):
        create_project(tmp_path, owner="acme", name="new", template="tools")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_the_command_prints_what_to_do_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("init", "acme/sort-words") == 0
    said = capsys.readouterr().out
    assert "acme/sort-words: 9 files in sort-words" in said
    assert "telescope env validate ." in said
    assert "  git init && git add ." in said
    git_init = ["git", "init", "-q", str(tmp_path)]
    subprocess.run(git_init, check=True)
    assert run("init", "acme/second") == 0
    assert "  git add . && git commit" in capsys.readouterr().out
    assert run("build", "sort-words", "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert (built["name"], built["version"]) == ("sort-words", "0.1.0")
    assert Path(built["path"]).stat().st_size == built["size"]
    assert run("init", "new", "--owner", "acme", "--dir", "other", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "acme/new"


def test_two_owners_are_one_too_many(capsys):
    assert run("init", "acme/new", "--owner", "corp") == 2
    assert "and --owner 'corp' name different owners" in capsys.readouterr().err
