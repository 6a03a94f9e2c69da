"""The static level: what files and metadata give away without running anything."""

import io
import json
import zipfile

import pytest
from tests.envs.projects import TOY, toy_files, write_project

from telescope_core.errors import ConfigError
from telescope_envs.publish.build import normalise
from telescope_envs.validation import (
    Level,
    Outcome,
    Report,
    ValidationOptions,
    Verdict,
    report_schema,
    validate_project,
    validate_wheel,
)
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.static import check_metadata, secrets_in

STATIC = ValidationOptions(level=Level.STATIC)
README = "# Toy\n\nAsks for yes. The reward is 1 for the answer yes, and 0 for any other. " * 2
FIELDS = {
    "Metadata-Version": "2.4",
    "Name": "telescope-env-acme-toy",
    "Version": "0.1.0",
    "Summary": "Says yes",
    "License-Expression": "MIT",
    "Keywords": "toy",
    "Requires-Python": ">=3.11",
    "Requires-Dist": "telescope-core<0.2,>=0.1",
}


def findings_of(readme=README, **changes):
    fields = {**FIELDS, **{key.replace("_", "-"): text for key, text in changes.items()}}
    lines = "".join(f"{key}: {text}\n" for key, text in fields.items() if text)
    findings = Findings()
    check_metadata(f"{lines}\n{readme}".encode(), "toy", findings)
    return {
        check.id: check.evidence[0].text
        for check in findings.results("")
        if check.outcome in (Outcome.FAIL, Outcome.WARN)
    }


def test_good_metadata_has_no_findings():
    assert findings_of() == {}


@pytest.mark.parametrize(
    ("check", "said", "changes"),
    [
        ("static.name", "'toy'", {"Name": "toy"}),
        ("static.name", "telescope-env-acme-other", {"Name": "telescope-env-acme-other"}),
        ("static.name", "'a'", {"Name": "telescope-env-a-toy"}),
        ("static.name", "0.1.0+local", {"Version": "0.1.0+local"}),
        ("static.name", "v1.0", {"Version": "v1.0"}),
        ("static.metadata", "description", {"Summary": ""}),
        ("static.metadata", "license", {"License_Expression": ""}),
        ("static.metadata", "mine, ask me", {"License_Expression": "mine, ask me"}),
        ("static.readme", "0 characters", {"readme": ""}),
        ("static.readme", "TODO", {"readme": f"# Toy\n\nTODO: write this. {README}"}),
        ("static.metadata", "requires-python", {"Requires_Python": ""}),
        ("static.metadata", ">=3.99", {"Requires_Python": ">=3.99"}),
        ("static.dependencies", "telescope-core", {"Requires_Dist": "numpy"}),
        ("static.dependencies", "allow", {"Requires_Dist": "telescope-core>=7,<8"}),
    ],
)
def test_each_fault_of_the_metadata_is_found_alone(check, said, changes):
    (found,) = findings_of(**changes).items()
    assert found[0] == check
    assert said in found[1]


@pytest.mark.parametrize(
    "requirement",
    [
        "other @ git+https://example.org/other",
        "other @ https://example.org/other-1.0.tar.gz",
        "telescope-env-acme-other",
    ],
)
def test_addresses_and_other_environments_are_no_dependencies(requirement):
    line = f"telescope-core<0.2,>=0.1\nRequires-Dist: {requirement}"
    assert list(findings_of(Requires_Dist=line)) == ["static.dependencies"]


def test_secrets_are_found_and_not_repeated():
    # Put together here, so that no scanner of this repository stumbles over them.
    token = "gh" + "p_" + "a1B2" * 9
    key = "-----BEGIN " + "RSA PRIVATE KEY-----"
    found = list(secrets_in(f"fine\nTOKEN = '{token}'\n{key}\n"))
    assert {secret.kind: secret.line for secret in found} == {
        "a GitHub token": 2,
        "a private key": 3,
    }
    assert token not in repr(found)
    assert list(secrets_in("sk-learn, hf_hub, AKIA, eyJ and ghp_short are no secrets")) == []


# In parts, for the same reason.
LOOK_LIKE_SECRETS = {
    "a private key": ("-----BEGIN ", "PRIVATE KEY BLOCK-----"),
    "an AWS access key": ("AS", "IA" + "A1B2" * 4),
    "a GitHub token": ("github_", "pat_" + "a1B2_" * 10),
    "a GitLab token": ("glp", "at-" + "a1B2-" * 4),
    "a Hugging Face token": ("h", "f_" + "abcdEFGH" * 5),
    "an Anthropic key": ("sk-a", "nt-" + "a1B2" * 8),
    "an OpenAI key": ("sk-", "a1B2" * 5 + "T3Blbk" + "FJ" + "a1B2" * 5),
    "a Slack token": ("xo", "xb-" + "1234-" * 4),
    "a Google key": ("AI", "za" + "a1B2_" * 7),
    "a Stripe key": ("rk_", "live_" + "a1B2" * 5),
    "a package index token": ("pypi", "-AgEI" + "a1B2_" * 10),
    "a signed web token": ("ey", "J" + "a1B2" * 4 + ".ey" + "J" + "a1B2" * 4 + "." + "a1B2" * 5),
}


@pytest.mark.parametrize("kind", LOOK_LIKE_SECRETS)
def test_a_secret_of_each_kind_is_found(kind):
    text = "".join(LOOK_LIKE_SECRETS[kind])
    (found,) = secrets_in(f"one\nKEY = '{text}'\n")
    assert (found.kind, found.line) == (kind, 2)


@pytest.mark.slow
def test_a_project_with_a_secret_and_a_moving_dataset(make_project):
    project = make_project(needs=("telescope-core>=0.1,<0.2",))
    token = "hf" + "_" + "abcdEFGH" * 5
    (project / "notes.txt").write_text(f"login with {token}\n")
    listed = [{"repo": "acme/sums", "revision": "main"}]
    (project / "datasets.json").write_text(json.dumps(listed))
    report = validate_project(project, STATIC)
    found = {check.id: check for check in report.checks if check.evidence}
    assert report.verdict is Verdict.FAIL
    assert "notes.txt:1 holds a Hugging Face token" in found["static.secrets"].evidence[0].text
    assert token not in report.canonical_json.decode()
    assert "acme/sums" in found["static.datasets"].evidence[0].text
    assert found["static.secrets"].fix


def test_a_hidden_file_of_a_project_without_git_is_scanned(make_project):
    project = make_project(needs=("telescope-core>=0.1,<0.2",))
    (project / ".env").write_text(f"TOKEN={'hf' + '_' + 'abcdEFGH' * 5}\n")
    report = validate_project(project, STATIC)
    found = {check.id: check for check in report.checks}
    assert found["static.secrets"].outcome is Outcome.FAIL
    assert ".env:1" in found["static.secrets"].evidence[0].text
    assert "abcdEFGH" not in report.canonical_json.decode()


def test_a_project_that_does_not_build_has_checks_that_were_not_run(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    report = validate_project(tmp_path, STATIC)
    outcomes = {check.id: check.outcome for check in report.checks}
    assert report.verdict is Verdict.FAIL
    assert outcomes["static.project"] is Outcome.FAIL
    assert outcomes["static.wheel"] is outcomes["static.metadata"] is Outcome.NOT_RUN


def test_a_folder_that_is_no_project_is_one_clear_message(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "pyproject.toml").write_text("")
    for folder, message in (
        (tmp_path, r"pyproject\.toml.* toy$"),
        (tmp_path / "nothing", "folder"),
    ):
        with pytest.raises(ConfigError, match=message) as refusal:
            validate_project(folder)
        assert str(folder) in str(refusal.value)


def test_a_wheel_that_is_none_fails_and_says_so():
    name = "telescope_env_acme_toy-0.1.0-py3-none-any.whl"
    report = validate_wheel(b"not a zip", name, STATIC)
    found = {check.id: check.outcome for check in report.checks}
    assert found["static.wheel"] is Outcome.FAIL
    assert found["static.name"] is Outcome.NOT_RUN
    assert found["static.project"] is Outcome.NOT_APPLICABLE


@pytest.mark.parametrize(("stated", "version"), [("v0.1.0", "0.1.0"), ("1.0.0-beta.1", "1.0.0b1")])
def test_another_spelling_of_a_version_is_told_how_to_write_it(stated, version):
    files = toy_files(version, owner="acme", name="toy", code=TOY)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text.replace(f"Version: {version}\n", f"Version: {stated}\n"))
    wheel = normalise(packed.getvalue(), epoch=1577836800)
    report = validate_wheel(wheel, f"telescope_env_acme_toy-{version}-py3-none-any.whl", STATIC)
    found = {check.id: check for check in report.checks}
    assert found["static.name"].outcome is Outcome.FAIL
    assert f"{stated!r} must be written {version!r}" in found["static.name"].evidence[0].text
    assert found["static.wheel"].outcome is not Outcome.FAIL


def test_a_report_is_read_back_with_the_same_digest(toy_wheel):
    report = validate_wheel(toy_wheel, "telescope_env_acme_toy-0.1.0-py3-none-any.whl", STATIC)
    again = Report.model_validate_json(report.canonical_json)
    assert again == report
    assert again.sha256 == report.sha256
    assert set(report_schema()["properties"]) == set(Report.model_fields)


@pytest.mark.slow
def test_a_file_of_examples_that_the_wheel_lacks_is_named(tmp_path):
    given = 'ListSource([Example(id=f"{split}-0", prompt="yes?")])'
    code = TOY.replace(given, '"rows.jsonl"')
    project = write_project(tmp_path / "toy", code=code)
    package = project / "telescope_env_acme_toy"
    (package / "rows.jsonl").write_text('{"prompt": "yes?"}\n')
    (project / "README.md").write_text("# Toy\n\nIt is to say yes, which earns 1.\n" * 9)
    pyproject = project / "pyproject.toml"
    text = pyproject.read_text().replace("[project]", '[project]\nreadme = "README.md"')
    pyproject.write_text(f'{text}exclude = ["*.jsonl"]\n')
    report = validate_project(project, ValidationOptions(level=Level.LOAD))
    (found,) = [check for check in report.checks if check.id == "load.examples"]
    told = "\n".join(one.text for one in found.evidence)
    assert "rows.jsonl" in found.evidence[0].text
    assert "telescope_env_acme_toy/rows.jsonl is not in the wheel" in told
    assert "artifacts" in told
