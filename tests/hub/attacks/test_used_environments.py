"""Attacks on what is used after it was installed: each fails closed, and says why."""

import shutil

import pytest
from tests.hub.projects import toy_publication, write_registry
from tests.hub.using.conftest import home, lock_of, telescope
from tests.hub.using.test_locator import install, lock

from telescope_core.errors import EnvironmentLoadError
from telescope_core.open import locate_environment
from telescope_envs.installing.build import venv_folder
from telescope_envs.linked import links

__all__ = ["home", "install", "telescope"]


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


def test_a_link_whose_folder_holds_another_environment_now(telescope, make_project):
    project = make_project()
    telescope("env", "link", str(project))
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("acme", "evil"))
    (project / "telescope_env_acme_toy").rename(project / "telescope_env_evil_toy")
    with pytest.raises(EnvironmentLoadError, match="which is evil/toy now"):
        locate_environment("acme/toy")


def test_the_same_name_and_version_of_another_registry_is_not_what_is_locked(install, tmp_path):
    """What is active came from elsewhere, with other bytes under the version that is locked."""
    ours = lock_of(toy_publication().release, str(tmp_path / "registry"))
    install(registry=write_registry(tmp_path / "theirs").address, requirements=("six==1.16.0",))
    lock(ours)
    with pytest.raises(EnvironmentLoadError, match="what is locked is not installed"):
        locate_environment("acme/toy@0.1.0")


def test_a_record_that_points_to_another_environments_files(install):
    """The record in a virtual environment must be of the digest that is locked."""
    one, other = install(requirements=("six==1.16.0",)), install("0.2.0")
    lock(one)
    assert locate_environment("toy").version == "0.1.0"
    shutil.copy(venv_folder(other) / "telescope.json", venv_folder(one) / "telescope.json")
    with pytest.raises(EnvironmentLoadError, match="run: telescope env sync"):
        locate_environment("toy")
