"""Plain pip and plain uv install from the simple index, served and rendered alike."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uv
from tests.envs.projects import toy_publication, write_registry
from tests.envs.serving import served

from telescope_envs.records.release import Status
from telescope_envs.registry.static_view import render
from telescope_envs.server.app import ServerOptions
from telescope_envs.server.auth import Scope

pytestmark = pytest.mark.slow

DISTRIBUTION = "telescope-env-acme-toy"
YANKED = "the reward paid for empty answers"


class QuietHandler(SimpleHTTPRequestHandler):
    """A static host that keeps its log to itself."""

    def log_message(self, *arguments) -> None:
        """Say nothing."""


@pytest.fixture(scope="module", params=["served", "rendered"])
def index(request, tmp_path_factory) -> Iterator[str]:
    """The address of a simple index with 0.1.0 and 0.2.0, the later one yanked."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write_registry(folder / "registry").store
    with served(folder / "hub") as hub:
        for store in (source, hub.store):
            for version in ("0.1.0", "0.2.0"):
                store.publish(toy_publication(version))
            store.change_status("acme/toy", lambda _: Status(yanked={"0.2.0": YANKED}))
        if request.param == "served":
            yield f"{hub.address}/simple/"
            return
    render(folder / "registry", folder / "view")
    handler = partial(QuietHandler, directory=str(folder / "view"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        thread = threading.Thread(target=host.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{host.server_port}/simple/"
        host.shutdown()
        thread.join()


def pip(index: str, target: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    """Install with the pip of this interpreter, whatever its configuration says."""
    command = [sys.executable, "-m", "pip", "--isolated", "--no-input", "install"]
    return run(
        command, index, target, "--no-cache-dir", "-q", "--disable-pip-version-check", *wanted
    )


def uv_pip(index: str, target: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    """Install with uv, whatever its configuration says."""
    command = [uv.find_uv_bin(), "pip", "install", "--no-config", "--python", sys.executable]
    return run(command, index, target, "--no-cache", *wanted)


def run(command: list[str], index: str, target: Path, *wanted: str):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    options = ["--no-deps", "--target", str(target), "--index-url", index]
    return subprocess.run(
        [*command, *options, *wanted],
        env={**environ, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(params=[pip, uv_pip], ids=["pip", "uv"])
def install(request, index, tmp_path):
    """Install into a folder of its own; returns the finished program."""
    return partial(request.param, index, tmp_path / "target")


def installed(target: Path) -> list[str]:
    return [path.name.split("-")[1] for path in target.glob("*.dist-info")]


def test_the_newest_that_is_not_yanked_is_installed(install, tmp_path):
    done = install(DISTRIBUTION)
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "target") == ["0.1.0.dist"]
    code = (tmp_path / "target/telescope_env_acme_toy/__init__.py").read_bytes()
    assert b"Says yes" in code


def test_a_yanked_version_is_installed_only_when_it_is_named(install, tmp_path):
    done = install(f"{DISTRIBUTION}==0.2.0")
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "target") == ["0.2.0.dist"]
    assert YANKED in done.stdout + done.stderr


def test_the_hash_of_a_lock_is_checked(install, tmp_path):
    right = toy_publication().release.wheel.sha256
    for digest, code in (("0" * 64, 1), (right, 0)):
        requirements = tmp_path / "requirements.txt"
        requirements.write_text(f"{DISTRIBUTION}==0.1.0 --hash=sha256:{digest}\n")
        done = install("--require-hashes", "-r", str(requirements))
        assert (done.returncode != 0) == code, done.stderr
        assert installed(tmp_path / "target") == ([] if code else ["0.1.0.dist"])


@pytest.mark.parametrize("tool", [pip, uv_pip], ids=["pip", "uv"])
def test_a_wheel_that_was_changed_on_the_server_is_refused(tool, tmp_path):
    with served(tmp_path / "hub") as hub:
        hub.store.publish(toy_publication())
        stored = hub.store.stored_artifact(toy_publication().release.wheel.urls[0])
        stored.path.write_bytes(toy_publication(code="Toy = None\n").wheel)
        done = tool(f"{hub.address}/simple/", tmp_path / "target", DISTRIBUTION)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert installed(tmp_path / "target") == []


@pytest.mark.parametrize("tool", [pip, uv_pip], ids=["pip", "uv"])
def test_a_private_index_takes_a_token_as_the_password(tool, tmp_path):
    with served(tmp_path / "hub", ServerOptions(is_private=True)) as hub:
        hub.store.publish(toy_publication())
        scheme, _, rest = hub.address.partition("://")
        with_password = f"{scheme}://__token__:{hub.token(Scope.READ)}@{rest}/simple/"
        done = tool(with_password, tmp_path / "target", DISTRIBUTION)
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "target") == ["0.1.0.dist"]
