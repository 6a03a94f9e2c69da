"""`--shared` for real, into a fresh virtual environment, with nothing left by a failure."""

import json
import os
import subprocess
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from tests.envs.projects import TOY

from telescope_envs.install.packages import missing_requirements
from telescope_envs.processes.uv import installed_pins
from telescope_envs.publish.first_party import publish

pytestmark = pytest.mark.slow
LOCATE = (
    "import json; from telescope_core.finding.locate import locate_environment; "
    "from telescope_core.open import open_environment; "
    "l = locate_environment('toy'); open_environment('acme/toy'); "
    "print(json.dumps([l.id, l.version, l.factory]))"
)


@pytest.fixture
def telescope(fresh_python, tmp_path):
    """Run `telescope` in the fresh environment, with no network; returns the finished process."""

    def run(*arguments: str, program: str = ""):
        code = program or "from telescope_cli.main import main; main()"
        environ = {**os.environ, "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
        environ["TELESCOPE_REGISTRY"] = str(tmp_path / "registry")
        environ["TELESCOPE_HOME"] = str(tmp_path / "home")
        return subprocess.run(
            [fresh_python, "-c", code, *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    yield run
    run("env", "uninstall", "acme/toy")


def installed(telescope) -> dict[str, str]:
    rows = json.loads(telescope("env", "list", "--installed", "--json").stdout)
    return {row["id"]: row["installed"] for row in rows if row["id"].startswith("acme/")}


def test_install_locate_list_and_uninstall(published, telescope):
    done = telescope("env", "install", "--shared", "toy", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {"name": "toy", "state": "installed", "id": "acme/toy", "version": "0.1.0"}
    ]
    again = telescope("env", "install", "--shared", "acme/toy@0.1.0")
    assert "already installed" in again.stdout
    located = telescope(program=LOCATE)
    assert json.loads(located.stdout) == ["acme/toy", "0.1.0", "telescope_env_acme_toy:Toy"]
    assert installed(telescope) == {"acme/toy": "0.1.0"}
    assert "installed    0.1.0" in telescope("env", "info", "toy").stdout
    assert telescope("env", "uninstall", "toy").returncode == 0
    assert installed(telescope) == {}
    missing = telescope(program=LOCATE)
    assert "environment 'toy' is not installed; run: telescope env install toy" in missing.stderr
    gone = telescope("env", "uninstall", "toy")
    assert gone.returncode == 2
    assert "unknown installed environment 'toy'" in gone.stderr


def test_another_version_replaces_the_installed_one(published, make_project, telescope):
    publish(published.store, make_project(version="0.2.0"), owner="acme", datasets=[])
    assert telescope("env", "install", "--shared", "toy@0.1.0").returncode == 0
    assert telescope("env", "install", "--shared", "toy").returncode == 0
    assert installed(telescope) == {"acme/toy": "0.2.0"}


def test_a_registry_that_has_moved_is_named_by_installing_again(published, telescope, tmp_path):
    assert telescope("env", "install", "--shared", "toy").returncode == 0
    moved = Path(published.address).rename(tmp_path / "moved")
    refused = telescope("env", "update", "toy")
    advice = "run: telescope env install acme/toy@0.1.0 --shared --registry PLACE"
    assert (refused.returncode, advice in refused.stderr) == (2, True)
    again = telescope("env", "install", "--shared", "acme/toy@0.1.0", "--registry", str(moved))
    assert (again.returncode, again.stdout) == (0, "acme/toy 0.1.0: already installed\n")
    assert telescope("env", "update", "toy").returncode == 0


def test_a_tampered_wheel_is_refused_and_changes_nothing(published, telescope):
    (release,) = published.releases("acme/toy")
    path = Path(published.address) / release.wheel.urls[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    done = telescope("env", "install", "--shared", "toy")
    assert done.returncode == 4
    assert "is not the one that was published" in done.stderr
    assert "Traceback" not in done.stderr
    path.unlink()
    done = telescope("env", "install", "--shared", "toy")
    assert done.returncode == 4
    assert "is at none of its URLs" in done.stderr
    assert installed(telescope) == {}


def test_one_bad_name_keeps_no_other_from_being_installed(published, telescope):
    done = telescope("env", "install", "--shared", "toy", "toi")
    assert done.returncode == 2
    assert "unknown environment 'toi'; did you mean 'toy'" in done.stderr
    assert "1 of 2 are installed" in done.stderr
    assert installed(telescope) == {"acme/toy": "0.1.0"}


def test_what_cannot_be_installed_beside_the_rest_says_so(registry, make_project, telescope):
    project = make_project(needs=("telescope-core", "pydantic<2", "no-such-package-of-telescope"))
    publish(registry.store, project, owner="acme", datasets=[])
    done = telescope("env", "install", "--shared", "toy")
    assert done.returncode == 3
    assert "acme/toy needs no-such-package-of-telescope, pydantic<2" in done.stderr
    assert installed(telescope) == {}


def test_an_environment_may_read_the_files_of_its_own_package(registry, make_project, telescope):
    read = '(Path(__file__).parent / "system.txt").read_text()'
    code = TOY.replace("from telescope_core", "from pathlib import Path\nfrom telescope_core", 1)
    code = code.replace("class Toy", f"SYSTEM = {read}\n\n\nclass Toy")
    given = 'ListSource([Example(id=f"{split}-0", prompt="yes?")])'
    code = code.replace(given, 'Path(__file__).parent / f"{split}.jsonl"')
    project = make_project(code=code)
    for name in ("train", "eval"):
        row = json.dumps({"id": name, "prompt": "yes?"})
        (project / f"telescope_env_acme_toy/{name}.jsonl").write_text(f"{row}\n")
    (project / "telescope_env_acme_toy/system.txt").write_text("Say yes.\n")
    publish(registry.store, project, owner="acme", datasets=[])
    (release,) = registry.releases("acme/toy")
    assert release.splits == {"train": 1, "eval": 1}
    done = telescope("env", "install", "--shared", "toy")
    assert done.returncode == 0, done.stderr
    assert installed(telescope) == {"acme/toy": "0.1.0"}


def test_missing_requirements_are_those_not_satisfied():
    assert missing_requirements(["telescope-core", "pydantic>=2"]) == []
    assert missing_requirements(["pydantic<1", "x-not-there[y]>1; python_version>'3'"]) == [
        "pydantic<1",
        "x-not-there[y]>1",
    ]
    assert missing_requirements(['x-not-there; extra == "more"']) == []


def test_pins_are_those_of_the_installed_packages():
    pins = {canonicalize_name(pin.partition("==")[0]): pin for pin in installed_pins()}
    assert pins["pydantic"] == f"pydantic=={version('pydantic')}"
    assert pins["telescope-core"].endswith(f"=={version('telescope-core')}")
    known = {canonicalize_name(found.name) for found in distributions() if found.name}
    assert set(pins) <= known
