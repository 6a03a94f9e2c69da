"""What must not be published: each attempt is refused with a reason and leaves nothing behind.

Those that validate a whole environment first start worker processes: they are slow.
"""

from datetime import UTC, datetime

import pytest
from tests.envs.authors import (
    MODULE,
    commit_all,
    copy_of,
    git,
    new_repository,
    publish,
    replace_in,
    tree,
)
from tests.envs.projects import toy_publication, write_registry

from telescope_cli.main import main
from telescope_core.errors import ConfigError, RegistryError, TelescopeError
from telescope_envs.publish import push
from telescope_envs.publish.release import (
    require_own_name,
    require_publishable,
)
from telescope_envs.registry import Registry
from telescope_envs.validation import (
    CheckResult,
    Level,
    Outcome,
    Report,
    Severity,
    ValidationOptions,
    Verdict,
    validate_project,
)


@pytest.fixture(scope="module")
def place_once(tmp_path_factory):
    """A repository with acme/sorted 0.1.0, and a registry that has acme/toy and no acme/sorted."""
    place = tmp_path_factory.mktemp("push")
    registry = write_registry(place / "registry")
    registry.store.publish(toy_publication())
    new_repository(place / "sorted")
    return place


@pytest.fixture
def place(place_once, tmp_path):
    return copy_of(place_once, tmp_path / "place")


def refused(place, project, error, message, **options):
    """Publishing `project` is refused, and neither it nor the registry is any different."""
    before = tree(place)
    with pytest.raises(error, match=message):
        publish(project, place / "registry", **options)
    assert tree(place) == before


def test_a_changed_file(place):
    replace_in(place / "sorted/README.md", "# ", "## ")
    refused(place, place / "sorted", ConfigError, r"differs from its commit: README\.md; commit")


@pytest.mark.parametrize("attest", ["auto", "never"])
@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("{", "Expecting property")])
def test_a_trust_configuration_that_cannot_be_read(place, tmp_path, text, message, attest):
    path = tmp_path / "trust.json"
    if text is not None:
        path.write_text(text)
    options = {"trust_config": path, "attest": attest, "dry_run": True}
    refused(place, place / "sorted", ConfigError, f"--trust-config {path}: .*{message}", **options)


def test_a_file_that_git_does_not_know(place):
    (place / "sorted" / "src" / MODULE / "extra.py").write_text("")
    refused(place, place / "sorted", ConfigError, r"differs from its commit: .*extra\.py")


def test_a_staged_file(place):
    (place / "sorted" / "more.txt").write_text("")
    git(place / "sorted", "add", "more.txt")
    refused(place, place / "sorted", ConfigError, r"more\.txt")


def test_a_project_outside_git(place, tmp_path):
    (place / "sorted" / ".git").rename(tmp_path / "gone")
    refused(place, place / "sorted", ConfigError, "not in a git repository.*--allow-no-git")


def test_a_folder_without_a_project(place):
    refused(place, place / "registry", ConfigError, r"contains no pyproject\.toml")
    refused(place, place / "gone", ConfigError, "gone is not a folder; .*telescope env init")


def test_a_repository_without_a_commit(place, tmp_path):
    (place / "sorted" / ".git").rename(tmp_path / "gone")
    git(place / "sorted", "init", "-q")
    refused(place, place / "sorted", ConfigError, "has no commit yet")


@pytest.mark.parametrize("name", ["toi", "t0y", "ty", "toyy"])
def test_a_name_one_edit_away_from_a_known_one(place, name):
    project = new_repository(place / name, name=name)
    refused(place, project, ConfigError, f"acme/{name} is new and easily confused with toy")


def test_a_name_near_another_is_fine_when_it_is_meant(place):
    require_own_name(Registry.at(place / "registry"), "acme/toi", new_name_ok=True)


@pytest.mark.parametrize("reserved", ["sorted", "acme", "SORTED"])
def test_a_reserved_name(place, reserved):
    (place / "registry/reserved.txt").write_text(f"# not for you\n{reserved}\n")
    refused(place, place / "sorted", RegistryError, f"'{reserved.lower()}' is a reserved name")


def test_a_namespace_that_nobody_owns(place):
    (place / "registry/namespaces/acme.toml").unlink()
    refused(place, place / "sorted", RegistryError, "nobody may publish as 'acme'")


def test_a_suspended_namespace(place):
    path = place / "registry/namespaces/acme.toml"
    path.write_text('owner = "acme"\nstatus = "suspended"\n')
    refused(place, place / "sorted", RegistryError, "namespace 'acme' is suspended")


def test_a_distribution_that_is_not_the_owners(place):
    pyproject = place / "sorted" / "pyproject.toml"
    replace_in(pyproject, 'sorted = "telescope', 'other = "telescope')
    commit_all(place / "sorted")
    refused(place, place / "sorted", ConfigError, "must be named telescope-env-<owner>-other")


@pytest.mark.slow
def test_other_bytes_under_a_published_version(place):
    Registry.at(place / "registry").store.publish(toy_publication(name="sorted"))
    refused(
        place, place / "sorted", RegistryError, r"0\.1\.0 is already published with different bytes"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bump": "0.0.9"}, r"0\.0\.9 is not above 0\.1\.0.*--bump 0\.1\.1$"),
        ({"bump": "0.1.0rc1", "commit": True}, r"0\.1\.0rc1 is not above 0\.1\.0"),
        ({"commit": True}, "give --bump as well"),
        ({"bump": "1.0+mine"}, "without a local part"),
    ],
)
def test_a_version_that_is_not_above_the_newest(place, options, message):
    refused(place, place / "sorted", ConfigError, message, **options)


@pytest.mark.slow
def test_a_version_below_the_newest_published(place):
    Registry.at(place / "registry").store.publish(toy_publication("0.5.0", name="sorted"))
    refused(place, place / "sorted", ConfigError, r"0\.1\.0 is not above 0\.5\.0, the newest")


def test_a_step_that_is_too_small_is_not_advised_again(place):
    Registry.at(place / "registry").store.publish(toy_publication("0.5.0", name="sorted"))
    message = r"0\.1\.1 is not above 0\.5\.0, the newest .*--bump 0\.5\.1$"
    refused(place, place / "sorted", ConfigError, message, bump="patch")


def test_a_push_that_nobody_can_be_asked_about(place, capsys):
    before = tree(place)
    with pytest.raises(SystemExit) as ended:
        main(["env", "push", str(place / "sorted"), "--registry", str(place / "registry")])
    assert ended.value.code
    assert "standard input is no terminal; add --yes" in capsys.readouterr().err
    assert tree(place) == before


@pytest.mark.slow
def test_what_does_not_pass_validation(place):
    (place / "sorted/README.md").write_text("")
    commit_all(place / "sorted")
    said: list[str] = []
    message = r"does not pass validation: static\.readme"
    refused(place, place / "sorted", TelescopeError, message, progress=said.append)
    evidence = said[-1]
    assert evidence.startswith("  x static.readme: fail. Expected: ")
    assert "the README has 0" in evidence
    assert "      fix: " in evidence
    assert "1 to correct before it can be published: static.readme" in evidence


@pytest.fixture
def validated_as(monkeypatch):
    """Return a function that lets what is pushed be built as always, and its checks end so."""

    def apply(*outcomes):
        def validated(copy, options, *, interpreter):
            of_files = validate_project(copy, ValidationOptions(level=Level.STATIC))
            return report_of(of_files.wheel_sha256, *outcomes)

        monkeypatch.setattr(push, "validate_project", validated)

    return apply


@pytest.mark.slow
def test_what_is_not_conclusive_is_shown_and_not_published(place, validated_as):
    validated_as(Outcome.PASS, Outcome.INCONCLUSIVE)
    said: list[str] = []
    message = r"not conclusive: .*reward\.gold"
    refused(place, place / "sorted", TelescopeError, message, progress=said.append)
    assert "reward.gold" in said[-1]
    assert "not conclusive" in said[-1]


def test_a_report_that_was_changed_by_hand():
    wheel, other = "1" * 64, "2" * 64
    good = report_of(wheel)
    require_publishable(good, wheel)
    failed = report_of(wheel, Outcome.PASS, Outcome.FAIL)
    with pytest.raises(TelescopeError, match=r"does not pass validation: reward\.gold;") as failing:
        require_publishable(failed, wheel)
    assert failing.value.exit_code == 1, "a check found something"
    with pytest.raises(TelescopeError, match=r"reward\.gold"):
        require_publishable(failed.model_copy(update={"verdict": Verdict.PASS}), wheel)
    with pytest.raises(TelescopeError, match="its verdict is fail"):
        require_publishable(good.model_copy(update={"verdict": Verdict.FAIL}), wheel)
    for cut in ({"checks": ()}, {"level": Level.STATIC}):
        with pytest.raises(TelescopeError, match="is not complete"):
            require_publishable(good.model_copy(update=cut), wheel)
    with pytest.raises(TelescopeError, match=r"not complete: reward\.gold were not run"):
        require_publishable(report_of(wheel, Outcome.PASS, Outcome.NOT_RUN), wheel)
    with pytest.raises(TelescopeError, match=r"not conclusive.*reward\.gold\. Nothing failed"):
        require_publishable(report_of(wheel, Outcome.PASS, Outcome.INCONCLUSIVE), wheel)
    with pytest.raises(TelescopeError, match=r"not conclusive.*its verdict"):
        require_publishable(good.model_copy(update={"verdict": Verdict.INCONCLUSIVE}), wheel)
    with pytest.raises(TelescopeError, match="is of a different wheel"):
        require_publishable(good, other)


def report_of(wheel_sha256, *outcomes):
    """Return a report whose two checks came out so."""
    outcomes = outcomes or (Outcome.PASS, Outcome.WARN)
    checks = tuple(
        CheckResult(id=name, level=Level.REWARD, severity=Severity.FAIL, outcome=outcome)
        for name, outcome in zip(("reward.range", "reward.gold"), outcomes, strict=True)
    )
    return Report(
        policy="1",
        environment="acme/sorted",
        version="0.1.0",
        wheel_sha256=wheel_sha256,
        level=Level.LEAKAGE,
        num_examples=1,
        created_at=datetime(2026, 11, 21, tzinfo=UTC),
        verdict=Verdict.FAIL if Outcome.FAIL in outcomes else Verdict.PASS,
        checks=checks,
    )


@pytest.mark.slow
def test_nothing_of_it_is_in_the_registry_when_the_index_cannot_be_written(place, validated_as):
    validated_as(Outcome.PASS, Outcome.PASS)
    index = place / "registry/index/acme"
    (index / "sorted.jsonl").mkdir(parents=True)
    with pytest.raises(RegistryError):
        publish(place / "sorted", place / "registry")
    assert not list((place / "registry/artifacts").glob("*sorted*"))
    assert Registry.at(place / "registry").releases("acme/toy")
