"""Attestations, signed and verified by a Sigstore on this machine: what holds and what not."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.sigstore_instance import SigstoreInstance, token_for_job, workflow

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.install.attestations import (
    AttestationPolicy,
    asks_for_attestation,
    check_attestation,
    trusted_root,
)
from telescope_envs.install.bundling import part_of_lock, write_bundle
from telescope_envs.install.data import wheels_folder
from telescope_envs.install.open_bundle import opened_bundle
from telescope_envs.install.pipeline import (
    checked_wheel,
    locked_environment,
)
from telescope_envs.install.steps import silent
from telescope_envs.install.sync import locked_wheel
from telescope_envs.publish.attesting import (
    AttestMode,
    attest_wheel,
)
from telescope_envs.records.reading import (
    Publication,
    attestation_path,
)
from telescope_envs.records.release import Publisher
from telescope_envs.registry import Registry
from telescope_envs.registry.config import (
    AttestationMode,
    parse_address,
    read_user_config,
)

ACME = Publisher(kind="repository", id="acme/envs", workflow="publish.yml")
TOY = toy_publication()


@pytest.fixture(scope="module")
def sigstore(tmp_path_factory):
    instance = SigstoreInstance(tmp_path_factory.mktemp("sigstore"))
    yield instance
    instance.close()


@pytest.fixture
def job(monkeypatch):
    """Make this process a CI job with an identity."""
    for name in ("GITHUB_ACTIONS", "CIRCLECI", "BUILDKITE", "GITLAB_CI", "SIGSTORE_ID_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def become(identity, **more):
        monkeypatch.setenv("GITLAB_CI", "true")
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", token_for_job(identity, **more))

    return become


@pytest.fixture
def sign(sigstore, job):
    def signed(identity=None, publication=TOY, **more):
        """Return the release and the bundle of `publication`, signed by a job of `identity`."""
        job(identity or workflow(), **more)
        attestation = attest_wheel(
            publication.release,
            AttestMode.ALWAYS,
            trust_config=sigstore.trust_config,
            progress=lambda step: None,
        )
        return attestation.recorded_in(publication.release), attestation.data

    return signed


@pytest.fixture
def policy(sigstore):
    return AttestationPolicy(
        mode=AttestationMode.REQUIRED, publishers=(ACME,), trusted_root=sigstore.trusted_root
    )


def refused(message, release, bundle, policy, wheel=TOY.wheel):
    with pytest.raises(RegistryError, match=message) as refusal:
        check_attestation(release, wheel, bundle, policy)
    assert is_plain(refusal.value)


def is_plain(error: Exception) -> bool:
    """Return whether an error is one line without the pages of a library."""
    return "\n" not in str(error) and "errors.pydantic.dev" not in str(error)


@pytest.mark.slow
def test_what_the_publishers_workflow_signed_holds(sign, policy, sigstore):
    before = sigstore.entries
    release, bundle = sign()
    assert sigstore.entries == before + 1
    assert release.attestation_sha256 == hashlib.sha256(bundle).hexdigest()
    assert check_attestation(release, TOY.wheel, bundle, policy) == workflow()
    any_workflow = policy.publishers[0].changed(workflow="")
    wider = AttestationPolicy(
        mode=AttestationMode.WHEN_PRESENT,
        publishers=(any_workflow,),
        trusted_root=policy.trusted_root,
    )
    assert check_attestation(release, TOY.wheel, bundle, wider) == workflow()


@pytest.mark.parametrize(
    "identity",
    [
        workflow("evil/envs"),
        workflow("acme/envs-evil"),
        workflow(name="other.yml"),
        workflow(ref="refs/pull/7/merge"),
        "https://github.com.evil.example/acme/envs/.github/workflows/publish.yml@refs/tags/v1",
    ],
)
def test_an_attestation_by_another_identity(sign, policy, identity):
    release, bundle = sign(identity)
    refused(r"is not valid: it was signed by .*Nothing was installed", release, bundle, policy)


def test_an_attestation_through_another_issuer(sign, policy):
    release, bundle = sign(issuer="https://issuer.evil.example")
    refused("is not valid.*OIDCIssuer", release, bundle, policy)


def test_a_bundle_for_another_wheel(sign, policy):
    other = toy_publication(code="# other\n")
    _, bundle = sign(publication=other)
    digest = hashlib.sha256(bundle).hexdigest()
    release = TOY.release.changed(attestation_sha256=digest)
    refused("is about something else", release, bundle, policy)


def test_a_bundle_for_another_version_of_the_same_bytes(sign, policy):
    later = toy_publication("0.2.0")
    _, bundle = sign(publication=later)
    digest = hashlib.sha256(bundle).hexdigest()
    release = TOY.release.changed(attestation_sha256=digest)
    refused("is about something else", release, bundle, policy)


def test_a_changed_statement(sign, policy):
    _, bundle = sign()
    opened = json.loads(bundle)
    payload = opened["dsseEnvelope"]["payload"]
    opened["dsseEnvelope"]["payload"] = payload[:-8] + "AAAA" + payload[-4:]
    changed = json.dumps(opened).encode()
    digest = hashlib.sha256(changed).hexdigest()
    release = TOY.release.changed(attestation_sha256=digest)
    refused("is not valid", release, changed, policy)


def test_another_bundle_than_the_one_that_was_published(sign, policy):
    release, _ = sign()
    _, second = sign()
    refused("is not the one that was published", release, second, policy)


def test_a_bundle_that_is_gone(sign, policy):
    release, _ = sign()
    for mode in (AttestationMode.REQUIRED, AttestationMode.WHEN_PRESENT):
        asked = AttestationPolicy(mode=mode, publishers=(ACME,), trusted_root=policy.trusted_root)
        refused("is gone from the registry", release, None, asked)


def test_required_but_missing(policy):
    refused('has no attestation.*attestations = "required"', TOY.release, None, policy)
    optional = AttestationPolicy(mode=AttestationMode.WHEN_PRESENT)
    assert check_attestation(TOY.release, TOY.wheel, None, optional) == ""


def test_a_namespace_without_a_repository_can_attest_nothing(sign, policy):
    release, bundle = sign()
    person = AttestationPolicy(
        mode=AttestationMode.REQUIRED,
        publishers=(Publisher(kind="user", id="acme"),),
        trusted_root=policy.trusted_root,
    )
    refused("published by no CI workflow", release, bundle, person)


def test_the_public_root_of_trust_is_there_without_a_network_and_trusts_no_other(
    sign, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    release, bundle = sign()
    public = AttestationPolicy(mode=AttestationMode.REQUIRED, publishers=(ACME,))
    assert trusted_root(None).get_fulcio_certs()
    refused("is not valid", release, bundle, public)


def test_what_is_no_bundle(policy):
    for data in (b"{}", b"no json", b"\xff"):
        digest = hashlib.sha256(data).hexdigest()
        release = TOY.release.changed(attestation_sha256=digest)
        refused("is not valid", release, data, policy)


def test_a_trust_config_that_is_none_says_so(job, tmp_path):
    job(workflow())
    (tmp_path / "trust.json").write_text("{}")
    for path in (tmp_path / "trust.json", tmp_path / "gone.json"):
        with pytest.raises(ConfigError, match="--trust-config") as refusal:
            attest_wheel(TOY.release, AttestMode.ALWAYS, trust_config=path, progress=print)
        assert str(path) in str(refusal.value)
        assert is_plain(refusal.value)


def test_a_trusted_root_that_is_none_says_so(tmp_path, sign):
    release, bundle = sign()
    (tmp_path / "root.json").write_text("{}")
    for path in (tmp_path / "root.json", tmp_path / "gone.json"):
        asked = AttestationPolicy(
            mode=AttestationMode.REQUIRED, publishers=(ACME,), trusted_root=path
        )
        with pytest.raises(ConfigError) as refusal:
            check_attestation(release, TOY.wheel, bundle, asked)
        assert str(path) in str(refusal.value)
        assert "trusted_root" in str(refusal.value)
        assert is_plain(refusal.value)


@pytest.fixture
def asking(tmp_path, monkeypatch, sigstore):
    """A registry whose acme publishes from CI, and a user whose file requires attestations."""
    registry = write_registry(tmp_path / "registry")
    namespace = 'owner = "acme"\n[[publishers]]\nkind = "repository"\nid = "acme/envs"\n'
    (tmp_path / "registry/namespaces/acme.toml").write_text(namespace)
    (tmp_path / "telescope").mkdir()
    lines = f'attestations = "required"\ntrusted_root = "{sigstore.trusted_root}"\n'
    (tmp_path / "telescope/config.toml").write_text(lines)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    return registry


def test_installing_takes_what_is_attested_and_leaves_nothing_of_what_is_not(asking, sign):
    release, bundle = sign()
    asking.store.publish(Publication(release=release, wheel=TOY.wheel, attestation=bundle))
    bare = toy_publication("0.2.0")
    asking.store.publish(bare)
    other, foreign = sign(workflow("evil/envs"), toy_publication("0.3.0"))
    wheel = toy_publication("0.3.0").wheel
    asking.store.publish(Publication(release=other, wheel=wheel, attestation=foreign))
    for refused_release, message in (
        (bare.release, "has no attestation"),
        (other, "signed by .*evil"),
    ):
        with pytest.raises(RegistryError, match=message):
            checked_wheel(asking, refused_release, progress=lambda step: None)
    assert not wheels_folder().exists() or list(wheels_folder().iterdir()) == []
    said = []
    assert checked_wheel(asking, release, progress=said.append).read_bytes() == TOY.wheel
    assert said[-1] == f"acme/toy 0.1.0: attested by {workflow()}"
    (Path(asking.address) / f"{attestation_path(release.wheel.urls[0])}").unlink()
    with pytest.raises(RegistryError, match="is gone from the registry"):
        checked_wheel(asking, release, progress=said.append)


@pytest.mark.parametrize("mode", ["when-present", "required"])
def test_a_stricter_setting_counts_for_what_was_fetched_before(asking, sign, tmp_path, mode):
    release, bundle = sign()
    asking.store.publish(Publication(release=release, wheel=TOY.wheel, attestation=bundle))
    config = tmp_path / "telescope/config.toml"
    lines = config.read_text()
    config.write_text("")
    checked_wheel(asking, release, progress=lambda step: None)
    entry = locked_environment(asking, release, ())
    (Path(asking.address) / attestation_path(release.wheel.urls[0])).unlink()

    def fetched() -> Path:
        return locked_wheel(
            entry, release, lambda address: Registry.at(Path(address)), lambda step: None
        )

    assert fetched().is_file()
    config.write_text(lines.replace("required", mode))
    with pytest.raises(RegistryError, match="is gone from the registry"):
        fetched()
    assert asks_for_attestation(asking.address, release)
    bare = toy_publication("0.2.0").release
    assert asks_for_attestation(asking.address, bare) == (mode == "required")


def test_a_bundle_is_held_to_who_may_sign_by_the_users_file(asking, sign, tmp_path, monkeypatch):
    release, attestation = sign()
    asking.store.publish(Publication(release=release, wheel=TOY.wheel, attestation=attestation))
    entry = locked_environment(asking, release, ())
    part = part_of_lock(entry, lambda named: asking, progress=silent)
    assert part.attestation == attestation
    path = tmp_path / "b.zip"
    write_bundle([part], path, progress=silent)
    write_bundle([replace(part, attestation=b"")], tmp_path / "bare.zip", progress=silent)
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "machine"))
    config = tmp_path / "telescope/config.toml"
    lines = config.read_text()

    def opened(bundle: Path = path) -> None:
        with opened_bundle(bundle, progress=silent):
            pass

    for signer, message in (
        ("", r"\[signers\] in .*telescope/config.toml"),
        ('acme = "evil/envs"\n', "signed by .*acme/envs.* published by .*evil/envs"),
    ):
        config.write_text(f"{lines}[signers]\n{signer}")
        with pytest.raises(RegistryError, match=message):
            opened()
        assert not wheels_folder().exists(), "nothing of it was kept"
    trusted = '[signers]\nacme = { repository = "acme/envs", workflow = "publish.yml" }\n'
    config.write_text(lines + trusted)
    with pytest.raises(RegistryError, match="did not come with its wheel"):
        opened(tmp_path / "bare.zip")
    opened()
    asked, root = lines.splitlines()
    named = f'[registries.lab]\naddress = "{asking.address}"\n{root}\n'
    config.write_text(f"{asked}\n{named}{trusted}")
    with pytest.raises(RegistryError, match="is not valid"):
        opened()  # not by the root of the registry that it names
    config.write_text(f'{asked}\n[signers.acme]\nrepository = "acme/envs"\n{root}\n')
    opened()
    config.write_text(lines + trusted)

    def gone(named: str) -> Registry:
        raise RegistryError("no network")

    said: list[str] = []
    wheel = locked_wheel(entry, release, gone, said.append, is_offline=True)
    assert said == [f"acme/toy 0.1.0: attested by {workflow()}"], "checked again from the cache"
    with pytest.raises(RegistryError, match="no network"):
        locked_wheel(entry, release, gone, silent)
    wheel.with_name(attestation_path(wheel.name)).write_bytes(b"{}")
    with pytest.raises(RegistryError, match="did not come with its wheel"):
        locked_wheel(entry, release, gone, silent, is_offline=True)


@pytest.mark.parametrize(
    "settings",
    [
        'attestations = "required"\n[registries.lab]\naddress = "HERE"\nattestations = "off"\n',
        '[registries]\ncorp = { address = "https://hub.corp", attestations = "required" }\n',
    ],
)
def test_no_bundle_chooses_a_weaker_setting_by_the_registry_it_names(
    asking, tmp_path, settings, monkeypatch
):
    asking.store.publish(TOY)
    config = tmp_path / "telescope/config.toml"
    config.write_text(settings.replace("HERE", asking.address))
    entry = locked_environment(asking, TOY.release, ())
    part = part_of_lock(entry, lambda named: asking, progress=silent)
    write_bundle([part], tmp_path / "b.zip", progress=silent)
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "machine"))
    signers = '[signers]\nacme = "acme/envs"\n'
    for lines, message in (("", r"attested.*\[signers\]"), (signers, 'attestations.*"required"')):
        config.write_text(settings.replace("HERE", asking.address) + lines)
        with (
            pytest.raises(RegistryError, match=message),
            opened_bundle(tmp_path / "b.zip", progress=silent),
        ):
            pass
        assert not wheels_folder().exists(), "nothing of it was kept"
    config.write_text("")
    with opened_bundle(tmp_path / "b.zip", progress=silent):
        assert [one.read_bytes() for one in wheels_folder().rglob("*.whl")] == [TOY.wheel]


def test_who_may_sign_is_read_strictly(tmp_path):
    (tmp_path / "telescope").mkdir()
    path = tmp_path / "telescope/config.toml"
    for lines, message in (
        ("signers = 1\n", "signers: .*table"),
        ("[signers]\nacme = { repo = 'acme/envs' }\n", "signers.*(repo|repository)"),
    ):
        path.write_text(lines)
        with pytest.raises(ConfigError, match=message) as refusal:
            read_user_config({"XDG_CONFIG_HOME": str(tmp_path)})
        assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ("off", None)),
        ('attestations = "when-present"\n[registries]\na = "ADDRESS"\n', ("when-present", None)),
        (
            '[registries]\na = { address = "ADDRESS", attestations = "required" }\n',
            ("required", None),
        ),
        (
            'attestations = "required"\n[registries]\n'
            'a = { address = "ADDRESS", attestations = "off", trusted_root = "/r" }\n',
            ("off", Path("/r")),
        ),
        (
            '[registries]\na = { address = "ADDRESS", attestations = "off" }\n'
            'b = { address = "ADDRESS", attestations = "required" }\n',
            ("required", None),
        ),
    ],
)
def test_the_users_file_says_what_is_asked_of_which_registry(lines, expected, tmp_path):
    (tmp_path / "telescope").mkdir()
    text = lines.replace("ADDRESS", str(tmp_path))
    (tmp_path / "telescope/config.toml").write_text(text)
    config = read_user_config({"XDG_CONFIG_HOME": str(tmp_path)})
    assert config.attestations_of(parse_address(str(tmp_path))) == expected


def test_without_an_identity_auto_says_so_and_always_refuses(job):
    said = []
    assert attest_wheel(TOY.release, AttestMode.AUTO, progress=said.append).data == b""
    assert said == ["attestation  none: this is not a CI job with an OIDC identity"]
    with pytest.raises(ConfigError, match="--attest always cannot sign: this is not a CI job"):
        attest_wheel(TOY.release, AttestMode.ALWAYS, progress=said.append)
    assert attest_wheel(TOY.release, AttestMode.NEVER, progress=said.append).data == b""


def test_a_sigstore_that_does_not_answer_publishes_nothing_and_shows_no_token(job, tmp_path):
    stopped = SigstoreInstance(tmp_path)
    stopped.close()
    job(workflow())
    with pytest.raises(RegistryError, match="did not sign") as refusal:
        attest_wheel(
            TOY.release,
            AttestMode.AUTO,
            trust_config=stopped.trust_config,
            progress=lambda step: None,
        )
    assert token_for_job(workflow()).split(".")[0] not in str(refusal.value)
