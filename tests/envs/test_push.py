"""Publishing a project, from its commit to the index line. Validating starts worker processes."""

import hashlib
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.envs.authors import commit_all, copy_of, git, new_repository, publish, replace_in, tree
from tests.envs.package_index import serve_index
from tests.envs.projects import write_registry
from tests.envs.sigstore_instance import SigstoreInstance, token_for_job, workflow

from telescope_cli.main import main
from telescope_core.errors import ConfigError, EnvironmentLoadError, RegistryError
from telescope_envs.publish import push
from telescope_envs.publish.attesting import AttestMode
from telescope_envs.registry import Registry
from telescope_envs.registry.stores.folder import LocalStore
from telescope_envs.validation import Level, ValidationOptions, validate_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def first_push(tmp_path_factory):
    """A repository with a project in a subfolder, a registry that has its 0.1.0, and its report."""
    place = tmp_path_factory.mktemp("pushed")
    write_registry(place / "registry")
    project = new_repository(place / "repository", inside="envs/sorted")
    git(project, "remote", "add", "origin", "https://me:s3cret@git.example/acme/envs.git")
    result = publish(project, place / "registry")
    assert result.state == "published"
    return place, result.report


@pytest.fixture
def place(first_push, tmp_path):
    return copy_of(first_push[0], tmp_path / "place")


@pytest.fixture
def project(place):
    return place / "repository/envs/sorted"


@pytest.fixture
def as_before(first_push):
    """Read and build what is pushed as always, but do not play what the first push has played."""

    def validated(copy: Path, options: ValidationOptions, *, interpreter: str):
        of_files = validate_project(copy, ValidationOptions(level=Level.STATIC))
        about = ("environment", "version", "wheel_sha256")
        return first_push[1].model_copy(update={name: getattr(of_files, name) for name in about})

    return validated


@pytest.fixture
def validated_before(as_before, monkeypatch):
    monkeypatch.setattr(push, "validate_project", as_before)


@pytest.fixture
def sigstore(tmp_path, monkeypatch):
    for name in ("GITHUB_ACTIONS", "CIRCLECI", "BUILDKITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token_for_job(workflow()))
    instance = SigstoreInstance(tmp_path)
    yield instance
    instance.close()


def test_the_record_says_where_it_comes_from_and_how_it_was_validated(place, project):
    (release,) = Registry.at(place / "registry").releases("acme/sorted")
    assert release.source.commit == git(project, "rev-parse", "HEAD")
    assert release.source.repository == "https://git.example/acme/envs"
    assert release.source.subdirectory == "envs/sorted"
    assert release.validation.verdict == "pass"
    assert len(release.validation.report_sha256) == 64
    assert (release.license, release.tags) == ("MIT", ("single-turn", "words"))
    assert "s3cret" not in (place / "registry/index/acme/sorted.jsonl").read_text()


def test_the_same_bytes_again_are_a_success_and_change_nothing(place, project):
    before = tree(place / "registry")
    (project / "NOTES.md").write_text("not in the wheel\n")
    commit_all(project)
    assert publish(project, place / "registry").state == "already published"
    assert tree(place / "registry") == before


def test_a_dependency_that_this_python_lacks_is_installed_once(
    place, project, as_before, monkeypatch
):
    environment = project / "src/telescope_env_acme_sorted/environment.py"
    environment.write_text(f"import helper_of_sorted\n{environment.read_text()}")
    about = project / "pyproject.toml"
    replace_in(about, 'dependencies = ["', 'dependencies = ["helper-of-sorted>=1", "')
    commit_all(project)
    steps: list[str] = []
    to = {"registry": place / "registry", "bump": "patch", "dry_run": True}
    with serve_index() as index:
        monkeypatch.setenv("UV_INDEX", index.address)
        monkeypatch.setenv("UV_HTTP_RETRIES", "0")
        index.add_source("helper-of-sorted", "1.0")
        with pytest.raises(EnvironmentLoadError, match="--allow-sdist helper-of-sorted"):
            publish(project, **to)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(push, "validate_project", as_before)
            sources = ("helper-of-sorted",)
            allowed = publish(project, allow_sdist=sources, progress=steps.append, **to)
        del index.asked[:]
        index.add("helper-of-sorted", "1.0")
        plain = publish(project, **to)
    for result in (allowed, plain):
        assert result.state == "would be published"
        assert result.report.verdict == "pass"
        assert set(result.release.splits) == {"train", "eval"}
    assert any(step.startswith("dependencies helper-of-sorted>=1: into") for step in steps)
    assert index.asked.count("/simple/helper-of-sorted/") == 1


@pytest.mark.usefixtures("validated_before")
def test_a_raised_version_is_committed_signed_and_published(place, project, sigstore):
    signing = {"attest": "always", "trust_config": sigstore.trust_config}
    result = publish(project, place / "registry", bump="minor", commit=True, **signing)
    assert (result.state, result.release.version) == ("published", "0.2.0")
    assert git(project, "log", "-1", "--format=%s") == "acme/sorted 0.2.0"
    assert git(project, "diff", "--stat", "HEAD~1").endswith("1 insertion(+), 1 deletion(-)")
    assert result.release.source.commit == git(project, "rev-parse", "HEAD")
    bundle = place / "registry" / f"{result.release.wheel.urls[0]}.sigstore.json"
    assert hashlib.sha256(bundle.read_bytes()).hexdigest() == result.release.attestation_sha256
    assert publish(project, place / "registry").state == "already published"


@pytest.mark.usefixtures("validated_before")
def test_what_cannot_be_published_after_its_version_was_raised_says_so(place, project, monkeypatch):
    before = git(project, "rev-parse", "HEAD")
    with pytest.raises(ConfigError, match="cannot sign"):
        publish(project, place / "registry", bump="minor", commit=True, attest=AttestMode.ALWAYS)
    assert git(project, "rev-parse", "HEAD") == before, "nothing was raised"
    refused = Mock(side_effect=RegistryError("this token may not publish as 'acme'"))
    monkeypatch.setattr(LocalStore, "publish", refused)
    with pytest.raises(RegistryError, match=r"as 'acme'; .*has version 0\.2\.0.*without --bump"):
        publish(project, place / "registry", bump="minor", commit=True)


@pytest.mark.usefixtures("validated_before")
def test_a_raised_version_that_is_not_committed_waits_for_it(place, project):
    before = tree(place / "registry")
    with pytest.raises(ConfigError, match=r"git commit -m 'acme/sorted 0\.1\.1' -- pyproject"):
        publish(project, place / "registry", bump="patch")
    assert tree(place / "registry") == before
    assert git(project, "status", "--porcelain").split() == ["M", "envs/sorted/pyproject.toml"]
    assert 'version = "0.1.1"' in (project / "pyproject.toml").read_text()


@pytest.mark.usefixtures("validated_before")
def test_a_dry_run_shows_what_changes_and_changes_nothing(place, project, capfd, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HUB_TOKEN", "s3cret-token")
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(place / "registry"))
    environment = project / "src/telescope_env_acme_sorted/environment.py"
    replace_in(environment, "threshold = 0.0, 1.0, 1.0", "threshold = 0.0, 1.0, 0.5")
    replace_in(project / "pyproject.toml", 'dependencies = ["', 'dependencies = ["numpy>=2", "')
    commit_all(project)
    before = tree(place)
    with pytest.raises(SystemExit) as ended:
        main(["env", "push", str(project), "--dry-run", "--bump", "patch"])
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    assert tree(place) == before
    assert "success threshold: 1 -> 0.5" in said.out
    assert "dependencies: telescope-core<0.2,>=0.1 -> numpy>=2, telescope-core" in said.out
    assert (
        "scores of 0.1.0 and 0.1.1 are not comparable; indicate that with a major version"
        in said.out
    )
    assert "would be published" in said.out
    assert "version      0.1.0 -> 0.1.1" in said.err
    assert "s3cret" not in said.out + said.err, "neither a token nor the password of the remote"


def test_a_version_that_was_removed_is_refused_before_it_is_validated(place, project):
    (place / "registry/removed.toml").write_text(
        f'[[removed]]\nid = "acme/sorted"\nversion = "0.1.1"\nsha256 = "{"1" * 64}"\n'
        'reason = "a secret"\n'
    )
    said: list[str] = []
    to = {"registry": place / "registry", "dry_run": True, "progress": said.append}
    with pytest.raises(RegistryError, match=r"0\.1\.1 was removed from this registry \(a secret\)"):
        publish(project, bump="patch", **to)
    assert not any(line.startswith("validating") for line in said)


@pytest.mark.usefixtures("validated_before")
def test_who_is_asked_and_says_no_publishes_nothing(place, project):
    before = tree(place)
    with pytest.raises(ConfigError, match="nothing was published"):
        publish(
            project, place / "registry", bump="patch", commit=True, confirm=lambda question: False
        )
    assert tree(place) == before


@pytest.mark.usefixtures("validated_before")
def test_the_command_to_install_what_was_pushed_names_the_registry(place, project, capfd):
    registry = str(place / "registry")
    options = ("--registry", registry, "--bump", "1.0.0", "--commit", "--yes")
    with pytest.raises(SystemExit) as ended:
        main(["env", "push", str(project), *options])
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    assert f"telescope env install acme/sorted --registry {registry}\n" in said.out
