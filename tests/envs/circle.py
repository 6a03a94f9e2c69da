"""A whole circle: init, edit, validate, push, search, install, eval, train, yank, update, sync,
bundle, and an install on a machine without any network. The same for every kind of registry.

The model that is measured is served by vLLM, or by an endpoint that gives every prompt one answer.
"""

import json
import os
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import uv
from tests.e2e.cli_runs import TELESCOPE
from tests.macos import like_macos
from tests.ports import free_port

from telescope_core.records import RunFolder
from telescope_envs.records.lockfile import LOCK_NAME, read_lock
from telescope_train.inference.server import SERVED_MODEL_NAME, ServerSettings, running
from telescope_train.models.tiny import make_tiny_model

ID = "acme/sort-words"
TRAIN = """
[run]
name = "circle"
number_of_steps = {steps}
[evals]
eval_after_training = false
[model]
model = {model}
{environments}
[rollout]
group_size = 4
prompts_batch_size_for_trainer = 6
max_tokens = 8
discard_group_zero_advantage = false
[trainer]
seq_len = 512
[inference]
inference_base_port = {port}
max_model_len = 512
"""
_VLLM_CACHE = str(Path.home() / ".cache" / "vllm")
_AS_ACME = {
    f"GIT_{role}_{what}": text
    for role in ("AUTHOR", "COMMITTER")
    for what, text in (("NAME", "acme"), ("EMAIL", "acme@example.org"))
}
LOOPBACK_IS_DOWN = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"


@dataclass(frozen=True)
class Place:
    """One registry: where authors push to, where users read, and what happens in between."""

    pushes_to: str
    reads_from: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of authors: their tokens."""
    refresh: Callable[[], None] = lambda: None
    """Makes visible to users what authors pushed."""


@dataclass(frozen=True)
class Machine:
    """A folder that is somebody's whole machine: a home, a data folder, a place to work in."""

    root: Path
    registry: str
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    """What every command is run by."""

    @property
    def work(self) -> Path:
        """The working directory."""
        folder = self.root / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, *arguments: str, where: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run `telescope` here."""
        return subprocess.run(
            [*self.prefix, *TELESCOPE, *arguments],
            cwd=where or self.work,
            env={
                **{name: value for name, value in os.environ.items() if "TOKEN" not in name},
                "HOME": str(self.root),
                **_AS_ACME,
                "UV_CACHE_DIR": _uv_cache(),
                # What vLLM has found out about a class of models, in a process for each.
                "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", _VLLM_CACHE),
                "TELESCOPE_HOME": str(self.root / "data"),
                "TELESCOPE_REGISTRY": self.registry,
                "OMP_NUM_THREADS": "1",
                **self.variables,
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def telescope(self, *arguments: str, where: Path | None = None) -> str:
        """Run a command that has to succeed; returns what it printed."""
        done = self.run(*arguments, where=where)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def locked(self) -> dict:
        """Return the only environment of telescope.lock."""
        (entry,) = tomllib.loads((self.work / "telescope.lock").read_text())["environments"]
        return entry


def _uv_cache() -> str:
    command = [uv.find_uv_bin(), "cache", "dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Engine:
    """A tiny model to train, and where a model answers that is measured."""

    model: Path
    base_url: str
    num_steps: int = 5
    """Length of each training."""


@contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Serve a tiny model, both of which lie in `folder`."""
    model = make_tiny_model(folder / "tiny", seed=0)
    settings = ServerSettings(
        model_path=str(model),
        port=free_port(),
        log_path=folder / "server.log",
        max_model_len=512,
        max_num_seqs=8,
    )
    with running(settings, deadline_s=180):
        yield Engine(model, f"{settings.base_url}/v1")


class _OneAnswer(BaseHTTPRequestHandler):
    """The part of a chat endpoint that an eval needs; every completion is the same."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": SERVED_MODEL_NAME}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "apple"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        self._send({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def _send(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def one_answer(folder: Path) -> Iterator[Engine]:
    """Make a tiny model that is trained for two steps, beside an endpoint with one answer."""
    model = make_tiny_model(folder / "tiny", seed=0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _OneAnswer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Engine(model, f"http://127.0.0.1:{server.server_port}/v1", num_steps=2)
        finally:
            server.shutdown()
            thread.join()


def go_round(
    place: Place,
    root: Path,
    engine: Engine,
    *,
    at_last: Callable[[Machine, Engine], None] | None = None,
) -> None:
    """Walk the whole circle in `root`, all but the training as it would be on macOS.

    `at_last`: trains with what is installed, at the end, for the training of the circle.
    """
    macos = like_macos(root / "macos")
    author = Machine(root / "author", place.pushes_to, macos | dict(place.variables))
    user = Machine(root / "user", place.reads_from, macos)
    trainer = replace(user, variables={})
    project = author.work / "sort-words"

    write_and_push(author, project)
    place.refresh()
    install_and_measure(user, engine)
    if at_last is None:
        train(trainer, engine, [ID])

    author.telescope("env", "yank", f"{ID}@0.1.0", "--reason", "counts ties twice")
    place.refresh()
    late = Machine(root / "late", place.reads_from, macos)
    refused = late.run("env", "install", ID)
    assert refused.returncode != 0
    assert "counts ties twice" in refused.stderr
    assert not (late.work / "telescope.lock").exists()

    author.telescope("env", "push", "--bump", "minor", "--commit", "--yes", where=project)
    place.refresh()
    user.telescope("env", "update", ID)
    assert user.locked()["version"] == "0.2.0"

    colleague = Machine(root / "colleague", place.reads_from)
    shutil.copy(user.work / "telescope.lock", colleague.work)
    colleague.telescope("env", "sync", "--locked")
    assert colleague.locked() == user.locked()
    assert installed(colleague) == {ID: "0.2.0"}

    take_to_an_island(colleague, root / "island")
    if at_last is not None:
        at_last(trainer, engine)


def write_and_push(author: Machine, project: Path) -> None:
    """Begin a project, change it, check it and publish it."""
    author.telescope("env", "init", ID, "--template", "single-turn")
    about = project / "pyproject.toml"
    lines = about.read_text().splitlines(keepends=True)
    edited = ['description = "Words, put in order"\n' if x.startswith("desc") else x for x in lines]
    about.write_text("".join(edited))
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "First version"]):
        subprocess.run(["git", *command], cwd=project, check=True, env={**os.environ, **_AS_ACME})
    report = json.loads(author.telescope("env", "validate", "--json", where=project))
    assert report["verdict"] in ("pass", "warn"), report
    dry = author.telescope("env", "push", "--dry-run", where=project)
    assert "Words, put in order" in dry
    author.telescope("env", "push", "--yes", where=project)


def install_and_measure(user: Machine, engine: Engine) -> None:
    """Find it, install it, and measure a model on it."""
    found = json.loads(user.telescope("env", "search", "words", "--json"))
    assert [row["id"] for row in found] == [ID]
    assert found[0]["summary"] == "Words, put in order"
    missing = user.run("eval", ID, "--base-url", engine.base_url, "--model", SERVED_MODEL_NAME)
    assert "telescope env install" in missing.stderr
    user.telescope("env", "install", ID)
    assert installed(user) == {ID: "0.1.0"}
    shape = ["--examples", "4", "--rollouts", "2", "--max-tokens", "8", "--json"]
    where = ["--base-url", engine.base_url, "--model", SERVED_MODEL_NAME]
    told = json.loads(user.telescope("eval", ID, *where, *shape))
    assert told["num_scored"] == 8


def train(user: Machine, engine: Engine, names: Sequence[str]) -> RunFolder:
    """Train a model on the environments `names`, which are locked; returns the folder."""
    config = training_config(user, engine, names)
    user.telescope("train", config.name)
    run = RunFolder.open(user.work / "runs" / "circle")
    assert len(run.metrics()) == engine.num_steps
    lock = read_lock(user.work / LOCK_NAME)
    for name in names:
        entry = lock.find(name)
        assert entry is not None
        assert entry.sha256 in (run.path / "run.json").read_text()
    return run


def training_config(user: Machine, engine: Engine, names: Sequence[str]) -> Path:
    """Write the config of a training."""
    config = user.work / "run.toml"
    settings = TRAIN.format(
        model=json.dumps(str(engine.model)),
        steps=engine.num_steps,
        port=free_port(),
        environments="\n".join(f'[[environments]]\nname = "{name}"' for name in names),
    )
    config.write_text(settings)
    return config


def take_to_an_island(colleague: Machine, root: Path) -> None:
    """Carry what is locked to a machine without a network, and install it there."""
    colleague.telescope("env", "bundle", "-o", "everything.zip")
    cut_off = ("unshare", "--map-root-user", "--net")
    fails = subprocess.run(
        [*cut_off, TELESCOPE[0], "-c", LOOPBACK_IS_DOWN], capture_output=True, check=False
    )
    assert b"Network is unreachable" in fails.stderr, fails.stderr
    own_cache = {"UV_CACHE_DIR": str(root / "cache")}
    island = Machine(root, "", own_cache, cut_off)
    shutil.copy(colleague.work / "everything.zip", island.work)
    island.telescope("env", "install", "--from-bundle", "everything.zip")
    assert installed(island) == {ID: "0.2.0"}
    assert island.locked()["requirements"] == colleague.locked()["requirements"]
    verified = island.run("env", "verify", ID)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def installed(machine: Machine) -> dict[str, str]:
    """Return id -> version of what a machine has of acme's."""
    rows = json.loads(machine.telescope("env", "list", "--installed", "--json"))
    return {row["id"]: row["installed"] for row in rows if row["id"].startswith("acme/")}
