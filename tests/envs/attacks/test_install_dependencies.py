"""Dependencies: wheels only, from the package index only, and never an environment's name."""

import hashlib
import io
import json
import subprocess
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import uv
from tests.envs.package_index import serve_index, tiny_wheel
from tests.envs.projects import TOY, toy_publication
from tests.processes import Program

from telescope_core.errors import EnvironmentLoadError, RegistryError
from telescope_envs.install.install import install
from telescope_envs.install.steps import InstallOptions
from telescope_envs.install.sync import sync_environment
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.lockfile import read_lock
from telescope_envs.registry import Registry
from telescope_envs.validation.processes import interpreter_with

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def index(monkeypatch):
    """A package index on loopback that is asked before the machine's own."""
    with serve_index() as served:
        monkeypatch.setenv("UV_INDEX", served.address)
        yield served


@pytest.fixture
def options(tmp_path) -> InstallOptions:
    return InstallOptions(lock=tmp_path / "telescope.lock")


@pytest.fixture
def publish(registry, make_wheel_with_needs):
    """Publish acme/toy with these needs."""

    def apply(*needs: str):
        registry.store.publish(make_wheel_with_needs(*needs))
        return registry

    return apply


@pytest.fixture
def make_wheel_with_needs(rewrite):
    def apply(*needs: str):
        plain = toy_publication()
        info = "telescope_env_acme_toy-0.1.0.dist-info/METADATA"
        text = metadata_of(plain.wheel, info)
        lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
        wheel = rewrite(plain.wheel, {info: f"{text}{lines}".encode()})
        file = plain.release.wheel.changed(
            sha256=hashlib.sha256(wheel).hexdigest(),
            size=len(wheel),
            metadata_sha256=hashlib.sha256(f"{text}{lines}".encode()).hexdigest(),
        )
        every = (*plain.release.requires_dist, *needs)
        release = plain.release.changed(wheel=file, requires_dist=every)
        return type(plain)(release=release, wheel=wheel)

    return apply


def metadata_of(wheel: bytes, path: str) -> str:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return archive.read(path).decode()


def assert_nothing_installed(home: Path, options: InstallOptions) -> None:
    assert [one for one in installed_environments() if one.id == "acme/toy"] == []
    assert list((home / "venvs").glob("*")) == []
    assert not options.lock.exists()


def test_an_environment_is_never_a_dependency(publish, home, options):
    registry = publish("telescope-env-acme-other>=1")
    with pytest.raises(RegistryError, match="'telescope-env-acme-other', a name that belongs to"):
        install(registry, "toy", options=options)
    assert not home.exists(), "refused before any download"


@pytest.mark.parametrize("name", ["telescope-env-acme-other", "telescope-envs", "telescope-core"])
def test_a_dependency_may_not_bring_what_belongs_to_telescope(publish, home, options, index, name):
    index.add("helper-of-toy", "1.0", needs=(name,))
    index.add(name, "99.0", code="raise SystemExit('evil')")
    with pytest.raises(RegistryError, match=r"belongs to Telescope|no index may supply") as refusal:
        install(publish("helper-of-toy"), "toy", options=options)
    assert name in str(refusal.value)
    assert_nothing_installed(home, options)


def test_index_and_hub_supply_nothing_that_is_the_others(publish, registry, home, options, index):
    """The environment is that of the Hub, and what it needs is that of the package index."""
    index.add("telescope-env-acme-toy", "99.0", code="raise SystemExit('evil')")
    wheel = index.add("helper-of-toy", "1.0")
    registry.store.publish(toy_publication("99.0", name="helper-of-toy", code="raise SystemExit"))
    done = install(publish("helper-of-toy"), "toy", options=options)
    assert done.release.version == "0.1.0"
    assert any("helper-of-toy" in path for path in index.asked)
    assert not [path for path in index.asked if "telescope" in path], "nobody asked for it there"
    (venv,) = (home / "venvs").iterdir()
    (package,) = venv.glob("lib/*/site-packages/telescope_env_acme_toy")
    assert package.is_dir()
    (line,) = [
        line
        for line in read_lock(options.lock).environments[0].requirements
        if line.startswith("helper-of-toy")
    ]
    pin, _, digest = line.partition(" --hash=sha256:")
    assert pin.endswith("==1.0"), "the version of the index, not that of the Hub"
    assert digest == hashlib.sha256(wheel).hexdigest()


def test_a_source_distribution_is_refused_where_wheels_are_required(publish, home, options, index):
    index.files["only-source-1.0.tar.gz"] = b"not even looked into"
    with pytest.raises(EnvironmentLoadError, match="--allow-sdist only-source"):
        install(publish("only-source"), "toy", options=options)
    assert_nothing_installed(home, options)
    assert not [path for path in index.asked if "files" in path], "it was not fetched"


def test_a_pin_that_differs_from_this_python_can_be_validated(index, home, tmp_path):
    """It is only preferred, as when it is locked; what does not conflict is as it is here."""
    index.add("iniconfig", "0.0.1")
    python = interpreter_with(["iniconfig==0.0.1"], tmp_path / "venv", needed_by="acme/toy")
    packages = next(Path(python).parent.parent.glob("lib/*/site-packages"))
    assert (packages / "iniconfig-0.0.1.dist-info").is_dir()
    assert (packages / f"pydantic-{version('pydantic')}.dist-info").is_dir()


def test_what_cannot_be_resolved_at_all_is_told(index, home, tmp_path):
    index.add("iniconfig", "0.0.1")
    with pytest.raises(EnvironmentLoadError, match=r"(?s)of acme/toy cannot be installed.*0\.0\.2"):
        interpreter_with(["iniconfig==0.0.2"], tmp_path / "venv", needed_by="acme/toy")


@pytest.mark.parametrize(
    ("sources", "wheels", "need", "version"),
    [
        (["1.0"], ["2.0"], "helper-of-toy", "2.0"),
        (["1.0", "2.0"], ["2.0"], "helper-of-toy", "2.0"),
        (["1.0", "2.0"], ["1.0"], "helper-of-toy", "2.0, built"),
        (["1.0"], [], "helper-of-toy", "1.0, built"),
        (["1.0"], ["2.0"], "helper-of-toy<2", "1.0, built"),
    ],
    ids=[
        "newest-is-a-wheel",
        "newest-is-both",
        "newest-is-source",
        "only-source",
        "need-is-source",
    ],
)
def test_what_may_be_built_is_built_only_where_it_has_no_wheel(
    publish, home, options, index, sources, wheels, need, version
):
    for one in sources:
        index.add_source("helper-of-toy", one)
    for one in wheels:
        index.add("helper-of-toy", one)
    allowed = replace(options, allow_sdist=("helper_of_toy",))
    install(publish(need), "toy", options=allowed)
    (site_packages,) = (home / "venvs").glob("*/lib/*/site-packages")
    (found,) = site_packages.glob("helper_of_toy-*.dist-info")
    is_built = "built" in (site_packages / "helper_of_toy.py").read_text()
    number = found.name.removesuffix(".dist-info").partition("-")[2]
    assert number + ", built" * is_built == version


@pytest.mark.parametrize("cut", ["/simple/helper", "/files/helper"])
def test_a_network_cut_while_locking_or_installing(publish, home, options, index, cut):
    index.add("helper-of-toy", "1.0")
    index.cut = cut
    registry = publish("helper-of-toy")
    with pytest.raises(EnvironmentLoadError, match="the dependencies of acme/toy"):
        install(registry, "toy", options=options)
    assert_nothing_installed(home, options)
    index.cut = ""
    assert install(registry, "toy", options=options).is_new


def test_a_dependency_that_changes_after_it_was_locked(publish, home, options, index, tmp_path):
    index.add("helper-of-toy", "1.0")
    registry = publish("helper-of-toy")
    install(registry, "toy", options=options)
    locked = options.lock.read_bytes()
    (name,) = [name for name in index.files if name.startswith("helper")]
    index.files[name] = tiny_wheel("helper-of-toy", "1.0", code="evil = 1")
    other = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELESCOPE_HOME", str(other))
        patch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        with pytest.raises(EnvironmentLoadError, match=r"(?i)hash"):
            install(registry, "toy", options=options)
        assert list((other / "venvs").glob("*")) == []
    assert options.lock.read_bytes() == locked


def test_what_is_tried_sees_no_token_and_no_home(registry, home, options, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    spy = (
        "import json, os, sys\n"
        "if {'HF_TOKEN', 'TELESCOPE_HUB_TOKEN', 'UV_INDEX'} & set(os.environ):\n"
        "    raise SystemExit('saw a token')\n"
        f"if os.environ['HOME'] == {json.dumps(str(Path.home()))} or not sys.flags.isolated:\n"
        "    raise SystemExit('saw the home')\n"
    )
    registry.store.publish(toy_publication(code=f"{spy}\n{TOY}"))
    assert install(registry, "toy", options=options).is_new


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"network": "always"}, "network 'none'"),
        ({"reward_weights": {"yes": 0.5}}, "reward_weights {'yes': 1.0}"),
    ],
)
def test_declarations_unlike_the_record(registry, home, options, fields, said):
    registry.store.publish(toy_publication(**fields))
    with pytest.raises(RegistryError, match=said):
        install(registry, "toy", options=options)
    assert_nothing_installed(home, options)


def sync(registry: Registry, options: InstallOptions):
    (entry,) = read_lock(options.lock).environments
    return sync_environment(
        entry,
        options=options,
        may_change=False,
        open_registry=lambda _: registry,
        progress=lambda step: None,
    )


def helper_in(folder: Path) -> Path:
    (found,) = folder.glob("venvs/*/lib/*/site-packages/helper_of_toy.py")
    return found


def test_a_change_in_one_environment_reaches_no_other_and_not_the_cache(
    publish, home, options, index, monkeypatch
):
    index.caching = "max-age=600"
    index.add("helper-of-toy", "1.0", code="good = True\n")
    registry = publish("helper-of-toy")
    install(registry, "toy", options=options)
    (venv,) = (home / "venvs").iterdir()
    files = [path for path in venv.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if path.stat().st_nlink > 1] == []
    compiled = next(venv.glob("lib/*/site-packages/pydantic/__pycache__/main.*.pyc"))
    source = compiled.parent.parent / "main.py"
    assert int.from_bytes(compiled.read_bytes()[8:12], "little") == int(source.stat().st_mtime)
    with helper_in(home).open("a") as file:
        file.write("good = False\n")
    monkeypatch.setenv("TELESCOPE_HOME", str(home.with_name("other")))
    sync(registry, options)
    assert helper_in(home.with_name("other")).read_text() == "good = True\n"


def test_reinstalling_brings_back_the_files_that_the_lock_names(publish, home, options, index):
    index.caching = "max-age=600"
    index.add("helper-of-toy", "1.0", code="good = True\n")
    registry = publish("helper-of-toy")
    install(registry, "toy", options=options)
    before = options.lock.read_bytes()
    unpacked = subprocess.check_output([uv.find_uv_bin(), "cache", "dir"], text=True).strip()
    cached = [
        path
        for path in Path(unpacked).glob("archive-v0/*/helper_of_toy.py")
        if path.read_text() == "good = True\n"
    ]
    assert cached, "else this tests nothing"
    for path in (helper_in(home), *cached):
        with path.open("a") as file:
            file.write("good = False\n")
    try:
        assert not sync(registry, options).is_new
        assert "False" in helper_in(home).read_text(), "what is built stays as it is"
        assert sync(registry, replace(options, reinstall=True)).is_new
    finally:
        for path in cached:
            path.write_text("good = True\n")
    assert helper_in(home).read_text() == "good = True\n"
    assert options.lock.read_bytes() == before


def test_a_failed_reinstallation_leaves_what_was_there(publish, home, options, index):
    index.add("helper-of-toy", "1.0")
    registry = publish("helper-of-toy")
    install(registry, "toy", options=options)
    here = helper_in(home)
    with pytest.raises(EnvironmentLoadError, match=r"--reinstall .*--offline"):
        sync(registry, replace(options, reinstall=True, offline=True))
    assert here.is_file()
    with Program([here.parents[3] / "bin" / "python", "-c", "input()"], stdin=-1) as run:
        with pytest.raises(EnvironmentLoadError, match="while processes run in"):
            sync(registry, replace(options, reinstall=True))
        run.communicate(b"\n")
    assert here.is_file()
