"""Attacks on what is used after it was installed: each fails closed, and says why."""

import shutil
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.using.conftest import home, lock_of, telescope
from tests.envs.using.test_locator import install, lock

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.finding.locate import locate_environment
from telescope_envs.install.data import venv_folder
from telescope_envs.records.links import links
from telescope_train.checkpoints.folders import CheckpointManifest
from telescope_train.checkpoints.resume import resume_point
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts import environments
from telescope_train.rollouts.sampled import SamplerState

__all__ = ["home", "install", "telescope"]


@pytest.mark.slow
def test_a_link_to_a_folder_that_has_vanished(telescope, make_project):
    project = make_project()
    telescope("env", "link", str(project))
    shutil.rmtree(project)
    with pytest.raises(EnvironmentLoadError, match="is not a folder") as refused:
        locate_environment("toy")
    assert "run: telescope env uninstall acme/toy" in str(refused.value)
    assert "broken linked" in telescope("env", "list", "--installed")[1]
    code, out, _ = telescope("env", "verify", "toy")
    assert (code, "1 problem" in out) == (1, True)
    assert telescope("env", "uninstall", "acme/toy")[0] == 0
    assert links() == []


@pytest.mark.slow
def test_a_link_whose_folder_holds_another_environment_now(telescope, make_project):
    project = make_project()
    telescope("env", "link", str(project))
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("acme", "evil"))
    (project / "telescope_env_acme_toy").rename(project / "telescope_env_evil_toy")
    with pytest.raises(EnvironmentLoadError, match="evil/toy"):
        locate_environment("acme/toy")


def test_the_same_name_and_version_of_another_registry_is_not_what_is_locked(install, tmp_path):
    """What is active came from elsewhere, with other bytes under the version that is locked."""
    ours = lock_of(toy_publication().release, str(tmp_path / "registry"))
    install(
        registry=write_registry(tmp_path / "theirs").address,
        requirements=(f"six==1.16.0 --hash=sha256:{'a' * 64}",),
    )
    lock(ours)
    with pytest.raises(EnvironmentLoadError, match=r"acme/toy 0\.1\.0") as refusal:
        locate_environment("acme/toy@0.1.0")
    assert str(Path("telescope.lock").resolve()) in str(refusal.value)
    assert "sync" in str(refusal.value)


def config_of(*flags: str) -> TrainConfig:
    """Write a checkpoint's run and return settings that continue it."""
    Path("run.toml").write_text(
        'name = "run"\nnumber_of_steps = 9\nmodel = "tiny"\n[[environments]]\nname = "acme/toy"\n'
    )
    return load_train_config([Path("run.toml")], ["--resume_from_checkpoint", "saved", *flags])


def records_of(config: TrainConfig) -> dict[str, EnvironmentRecord]:
    return environments.records_of(environments.find_environments(config)[0])


def save_checkpoint(config: TrainConfig) -> None:
    """Leave a checkpoint of a run on what is locked now."""
    Path("saved/state").mkdir(parents=True, exist_ok=True)
    Path("saved/state/.metadata").touch()
    manifest = CheckpointManifest(
        run="run",
        step=3,
        num_ranks=1,
        has_training_state=True,
        config=config.model_dump(mode="json"),
        environment_records=records_of(config),
    )
    Path("saved/checkpoint.json").write_text(manifest.model_dump_json())
    state = SamplerState(next_batch=3, draw_position=0, batches={})
    write_sampler_state(Path("saved"), state)


def test_a_downgrade_by_a_changed_lock_is_refused_at_resume(install):
    older, newer = (
        install("0.1.0", requirements=(f"six==1.16.0 --hash=sha256:{'a' * 64}",)),
        install("0.2.0"),
    )
    lock(newer)
    save_checkpoint(config_of())
    lock(older)
    with pytest.raises(
        ConfigError, match="the code of the environments differs from what"
    ) as refused:
        resume_point(config_of(), records_of(config_of()))
    for text in (
        "acme/toy: version: 0.2.0 -> 0.1.0",
        "acme/toy: sha256: ",
        "--allow-changed-environments",
        "telescope env sync",
    ):
        assert text in str(refused.value)
    assert not Path("runs").exists()
    told = config_of("--allow-changed-environments")
    save = CheckpointManifest.model_validate_json(Path("saved/checkpoint.json").read_text())
    Path("saved/checkpoint.json").write_text(
        save.model_copy(update={"config": told.model_dump(mode="json")}).model_dump_json()
    )
    point = resume_point(told, records_of(told))
    assert point is not None
    assert "environment acme/toy: version: 0.2.0 -> 0.1.0" in point.changed


def test_other_packages_under_the_same_version_are_refused_at_resume(install):
    first = install("0.1.0", requirements=(f"six==1.17.0 --hash=sha256:{'a' * 64}",))
    lock(first)
    save_checkpoint(config_of())
    lock(install("0.1.0", requirements=(f"six==1.16.0 --hash=sha256:{'a' * 64}",)))
    with pytest.raises(ConfigError, match=r"acme/toy: dependency six: 1\.17\.0 -> 1\.16\.0"):
        resume_point(config_of(), records_of(config_of()))
    assert not Path("runs").exists()


def test_a_record_that_points_to_another_environments_files(install):
    """The record in a virtual environment must be of the digest that is locked."""
    one, other = install(requirements=(f"six==1.16.0 --hash=sha256:{'a' * 64}",)), install("0.2.0")
    lock(one)
    assert locate_environment("toy").version == "0.1.0"
    shutil.copy(venv_folder(other) / "telescope.json", venv_folder(one) / "telescope.json")
    with pytest.raises(EnvironmentLoadError, match="run: telescope env sync"):
        locate_environment("toy")
