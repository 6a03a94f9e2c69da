"""Validating an environment of a dataset on rows of its author's own, and what is told of it."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from tests.envs.projects import write_project, write_registry

from telescope_core.errors import ConfigError
from telescope_envs.publish import first_party
from telescope_envs.validation import (
    Level,
    ValidationOptions,
    Verdict,
    validate_project,
    validate_wheel,
)
from telescope_envs.validation.fixture_hub import (
    TOKEN,
    FixtureHub,
)
from telescope_envs.validation.render import (
    as_markdown,
    as_text,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = f'''"""Sums of a dataset."""

from telescope_core import SingleTurnEnvironment, reward
from telescope_core.dataset_source import DatasetSource, DatasetSpec

SPEC = DatasetSpec(path="acme/sums", revision="{COMMIT}")


class Toy(SingleTurnEnvironment):
    """Adds."""

    network = "load"
    secrets = ("HF_TOKEN",)

    def examples(self, split):
        return DatasetSource(SPEC, split)

    def dataset_revisions(self):
        return SPEC.revisions()

    def gold_answer(self, example):
        return example.answer

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text[-20:].strip() == example.answer)
'''
README = "# Sums\n\nTwo numbers are to be added. The reward is 1 for the right sum.\n" * 3


@pytest.fixture
def project(tmp_path):
    folder = write_project(
        tmp_path / "toy", code=CODE, needs=("telescope-core>=0.1,<0.2", "datasets>=4")
    )
    text = (folder / "pyproject.toml").read_text()
    readme = 'readme = "README.md"\nkeywords = ["mathematics"]\n'
    (folder / "pyproject.toml").write_text(
        text.replace('license = "MIT"\n', f'license = "MIT"\n{readme}')
    )
    (folder / "README.md").write_text(README)
    rows = folder / "fixture-rows" / "acme" / "sums"
    rows.mkdir(parents=True)
    for split, first in (("train", 100), ("test", 500)):
        sums = [(first + 7 * n, 13 * n + 11) for n in range(12)]
        lines = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in sums]
        (rows / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    return folder


@pytest.mark.slow
def test_the_report_and_the_release_say_that_fixture_rows_were_checked(
    project, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("HF_TOKEN", "hf_a_real_token_that_stays_here")
    reports = []

    def validated(folder, options, *, interpreter):
        fewer = replace(options, num_examples=4)
        reports.append(validate_project(folder, fewer, interpreter=interpreter))
        return reports[-1]

    monkeypatch.setattr(first_party, "validate_project", validated)
    registry = write_registry(tmp_path / "registry")
    first_party.publish(registry.store, project, owner="acme", datasets=[], validate=True)
    (report,) = reports
    assert report.verdict is Verdict.PASS, as_text(report)
    assert report.checked_on == "fixture rows"
    assert "checked on fixture rows" in as_text(report)
    assert "checked on fixture rows" in as_markdown(report)
    assert report.facts["examples_train"] == 12
    assert not (tmp_path / "own").exists(), "fixture rows must not get into the real cache"
    (release,) = registry.releases("acme/toy")
    assert (release.validation.verdict, release.validation.checked_on) == ("pass", "fixture rows")
    assert release.splits == {"train": None, "eval": None}, "fixture rows are not counted"


@pytest.mark.slow
def test_wrong_rows_are_found(project):
    rows = project / "fixture-rows/acme/sums/test.jsonl"
    rows.write_text(rows.read_text() + '{"question": "1 + 1 = ?", "answer": ""}\n')
    options = ValidationOptions(fixture_rows=True, level=Level.LOAD)
    report = validate_project(project, options)
    assert report.verdict is Verdict.FAIL
    (found,) = [check for check in report.checks if check.id == "load.examples"]
    assert "has an empty answer field" in found.evidence[0].text


@pytest.mark.slow
def test_without_rows_the_flag_is_one_message(project, tmp_path):
    for path in sorted((project / "fixture-rows").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    options = ValidationOptions(fixture_rows=True)
    with pytest.raises(ConfigError, match=r"fixture-rows.*OWNER/NAME"):
        validate_project(project, options)
    (project / "fixture-rows").rmdir()
    with pytest.raises(ConfigError, match="fixture-rows") as refusal:
        validate_project(project, options)
    assert str(project) in str(refusal.value)


def test_a_wheel_has_no_rows(toy_wheel):
    name = "telescope_env_acme_toy-0.1.0-py3-none-any.whl"
    with pytest.raises(ConfigError) as refusal:
        validate_wheel(toy_wheel, name, ValidationOptions(fixture_rows=True))
    assert "acme/toy" in str(refusal.value)
    assert "fixture-rows" in str(refusal.value)


def asked(hub: FixtureHub, path: str, token: str = "") -> tuple[int, str]:
    address = f"{hub.environ(Path('unused'))['HF_ENDPOINT']}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["X-Error-Code"]


def test_a_commit_is_kept_and_a_branch_is_one(project):
    with FixtureHub(project / "fixture-rows") as hub:
        kept = json.loads(asked(hub, f"/api/datasets/acme/sums/revision/{COMMIT}")[1])
        branch = json.loads(asked(hub, "/api/datasets/acme/sums/revision/main")[1])
    assert kept["sha"] == COMMIT
    assert len(branch["sha"]) == 40
    assert branch["siblings"] == [{"rfilename": "test.jsonl"}, {"rfilename": "train.jsonl"}]


def test_what_is_not_there_is_refused_as_by_the_hub(project):
    sums, other = "/api/datasets/acme/sums", "/api/datasets/acme/other"
    file = f"/datasets/acme/sums/resolve/{COMMIT}/x"
    with FixtureHub(project / "fixture-rows") as hub:
        assert asked(hub, other) == (404, "RepoNotFound")
        assert asked(hub, file) == (404, "EntryNotFound")
    with FixtureHub(project / "fixture-rows", token=TOKEN) as gated:
        assert asked(gated, sums) == (401, "GatedRepo")
        assert asked(gated, sums, TOKEN)[0] == 200
