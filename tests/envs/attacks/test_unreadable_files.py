"""Any file that somebody else wrote, with anything in it: one message, from every command.

Each file is changed in one place at a time, and read by each command that reads it. The command may
succeed, or say what is wrong. It never ends in a traceback.
"""

import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.envs.bundles import entry_of
from tests.envs.projects import toy_publication, write_project

from telescope_cli import main as cli
from telescope_cli.env import info
from telescope_envs.records.files import read_file, sha256_of
from telescope_envs.records.installed import Installation
from telescope_envs.records.lockfile import (
    Lock,
    write_lock,
)
from telescope_envs.records.model import converted
from telescope_envs.registry import Registry
from telescope_envs.registry.http_cache import HttpCache

DEEP, LONG = 100_000, 5_000
JSON_VALUES = (
    "[" * DEEP,
    "[" * 200 + "]" * 200,
    "9" * LONG,
    "-1",
    "1e999",
    "NaN",
    "null",
    "[]",
    "{}",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"{foo}"',
    '"{filename.__class__}"',
    "\"x ; python_version ~= 'abc'\"",
    '"not a requirement at all"',
    '"http://[::1"',
    '"https://host:99999/x.whl"',
    '"http://host:port/"',
    '"../../../etc/passwd"',
    f'"{"9" * LONG}"',
    f'">={"9" * LONG}"',
    f'"x; {"(" * 3000}"',
    '["\\ud800", {"a": [[]]}]',
)
TOML_VALUES = (
    "[" * LONG,
    "{a=" * LONG,
    "[" * 200 + "]" * 200,
    "9" * LONG,
    "0x" + "f" * LONG,
    "1979-05-27",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "inf",
    "nan",
    "true",
    "[]",
    "{}",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"~nobody-of-this-name/x"',
    '"http://[::1"',
    '"https://host:99999/"',
    '"hf://x"',
    '"not a requirement at all"',
    f'"{"9" * LONG}"',
    '["a", 1, 1979-05-27]',
)
BYTES = (
    b"",
    b"\xff\xfe",
    b"\0" * 100,
    b"\xef\xbb\xbf",
    b"[" * 5_000,
    b"a." * 5_000 + b"a = 1\n",
    b"\r",
)
RNG = random.Random(11)


def changed_json(text: str) -> Iterator[bytes]:
    """Yield the document with each of its values replaced by each of the odd ones."""
    document = json.loads(text)
    mark = "3f1a-here"
    for path in paths_of(document):
        for value in JSON_VALUES:
            copy = json.loads(text)
            here = copy
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = mark
            yield json.dumps(copy).replace(f'"{mark}"', value).encode()


def paths_of(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if before:
        yield before
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from paths_of(inner, (*before, key))


def changed_toml(text: str) -> Iterator[bytes]:
    """Yield the document with the value of each line replaced, and with a line more."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        key, equals, _ = line.partition("=")
        for value in TOML_VALUES:
            if equals:
                changed = [*lines[:number], f"{key}= {value}\n", *lines[number + 1 :]]
                yield "".join(changed).encode()
            elif number == 0:
                yield f"zz = {value}\n{text}".encode()


def some(versions: Iterator[bytes], at_most: int) -> list[bytes]:
    """Return some of `versions`, always the same, and what is no document at all."""
    found = list(versions)
    return [*RNG.sample(found, min(at_most, len(found))), *BYTES]


@pytest.fixture
def attempt(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str], bytes], int]:
    """Run a command that must end without a traceback; returns its exit code."""

    def run(command: Sequence[str], data: bytes) -> int:
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main(command)
        except BaseException as error:
            error.add_note(f"{' '.join(command)}\n{data[:300]!r}")
            raise
        said = capsys.readouterr()
        code = ended.value.code or 0
        assert code in range(5), (command, data[:200], said.err[-500:])
        assert "Traceback" not in said.err
        assert not code or said.err or said.out, "a refusal says why"
        return int(code)

    return run


@pytest.fixture
def place(registry: Registry, home: Path, tmp_path: Path, monkeypatch) -> Path:
    """A working directory in which every kind of file is there; its registry has no wheels."""
    toy = toy_publication()
    registry.store.publish(toy)
    root = Path(registry.address)
    (root / "artifacts" / toy.release.wheel.filename).unlink()
    (root / "status" / "acme" / "toy.json").write_text('{"yanked": {}, "advisories": ["a"]}')
    (root / "reserved.txt").write_text("admin\n")
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(root))
    # The same code has the same settings, so one process for each question is enough.
    monkeypatch.setattr(info, "declared_settings", cache(info.declared_settings))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = tmp_path / "config" / "telescope" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        f'registry = "corp"\nattestations = "off"\ntrusted_root = "x"\n[registries]\n'
        f'corp = "{root}"\nlab = {{ address = "http://10.0.0.5:8080", insecure = true }}\n'
    )
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    write_project(work / "project", needs=("telescope-core", "six>=1"))
    write_lock(work / "telescope.lock", Lock(environments=(entry_of(toy, registry=str(root)),)))
    installation = converted(
        Installation,
        {"registry": str(root), "installed_at": "2026-11-21T12:00:00Z", "release": toy.release},
    )
    for folder, name, text in (
        ("environments/acme", "toy.json", installation.as_json().decode()),
        ("links/acme", "toy.json", link_to(work / "project")),
        (f"cache/wheels/{'a' * 64}", "release.json", cached(installation)),
    ):
        (home / folder).mkdir(parents=True)
        (home / folder / name).write_text(text)
    return work


def link_to(folder: Path) -> str:
    return json.dumps(
        {"id": "acme/toy", "folder": str(folder), "linked_at": "2026-11-21T12:00:00Z"}
    )


def cached(installation: Installation) -> str:
    release = installation.release.as_table()
    return json.dumps({"registry": installation.registry, "release": release})


READS_REGISTRY = (
    ("env", "list"),
    ("env", "search", "toy"),
    ("env", "info", "acme/toy"),
    ("env", "info", "toy"),
    ("env", "install", "toy", "--no-lock"),
    ("env", "install", "toy@0.1.0", "--shared", "--no-lock"),
    ("env", "bundle", "acme/toy@0.1.0", "-o", "b.zip"),
    ("env", "update"),
    ("env", "yank", "acme/toy@0.1.0", "--reason", "x"),
    ("env", "deprecate", "acme/toy", "--reason", "x"),
    ("hub", "check", "../registry"),
    ("hub", "render", "../registry", "-o", "rendered"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("config.json", 60),
        pytest.param("index/acme/toy.jsonl", 150, marks=pytest.mark.slow),
        pytest.param("status/acme/toy.json", 40, marks=pytest.mark.slow),
    ],
)
def test_records_of_a_registry(name: str, at_most: int, place: Path, attempt) -> None:
    path = place.parent / "registry" / name
    text = path.read_text()
    for number, data in enumerate(some(changed_json(text), at_most)):
        path.write_bytes(data if name != "index/acme/toy.jsonl" else data + b"\n")
        attempt(READS_REGISTRY[number % len(READS_REGISTRY)], data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aliases.toml", "namespaces/acme.toml", "reserved.txt"])
def test_tables_of_a_registry(name: str, place: Path, attempt) -> None:
    path = place.parent / "registry" / name
    text = path.read_text()
    versions = [*changed_toml(text), *BYTES]
    for number, data in enumerate(versions):
        path.write_bytes(data)
        for command in READS_REGISTRY[number % 6 :: 6]:
            attempt(command, data)


READS_USER_CONFIG = (
    ("env", "list"),
    ("env", "info", "toy"),
    ("env", "install", "lab:toy"),
    ("env", "install", "toy", "--offline"),
    ("env", "update"),
)


@pytest.mark.slow
def test_the_users_configuration(place: Path, attempt, monkeypatch) -> None:
    monkeypatch.delenv("TELESCOPE_REGISTRY")
    path = place.parent / "config" / "telescope" / "config.toml"
    for number, data in enumerate(some(changed_toml(path.read_text()), 50)):
        path.write_bytes(data)
        attempt(READS_USER_CONFIG[number % len(READS_USER_CONFIG)], data)


READS_LOCK = (
    ("env", "sync", "--locked", "--offline"),
    ("env", "list"),
    ("env", "info", "toy"),
    ("env", "verify"),
    ("env", "tree"),
    ("env", "bundle", "-o", "b.zip"),
    ("env", "update"),
    ("env", "install", "toy"),
    ("env", "uninstall", "toy"),
)


@pytest.mark.slow
def test_a_lock(place: Path, attempt) -> None:
    path = place / "telescope.lock"
    for number, data in enumerate(some(changed_toml(path.read_text()), 50)):
        path.write_bytes(data)
        attempt(READS_LOCK[number % len(READS_LOCK)], data)


READS_PROJECT = (
    ("env", "link", "project"),
    ("env", "push", "project", "--allow-no-git", "--dry-run"),
    ("env", "push", "project", "--allow-no-git", "--bump", "minor", "--yes"),
    ("env", "info", "acme/toy"),
    ("env", "verify", "acme/toy"),
    ("env", "list"),
    ("env", "validate", "project", "--level", "static"),
)


@pytest.mark.slow
def test_a_project(place: Path, attempt) -> None:
    path = place / "project" / "pyproject.toml"
    # Without a build backend, so that nothing is built where the change does no harm.
    text = path.read_text().replace(
        'requires = ["hatchling"]\nbuild-backend = "hatchling.build"\n', ""
    )
    for number, data in enumerate(some(changed_toml(text), 40)):
        path.write_bytes(data)
        attempt(READS_PROJECT[number % len(READS_PROJECT)], data)
    whole = f"[build-system]\nbuild-backend = 'x'\nrequires = []\n{text.partition('[project]')[1:]}"
    for value in TOML_VALUES:
        data = whole.replace("requires = []", f"requires = {value}").encode()
        path.write_bytes(data)
        attempt(("env", "push", "project", "--allow-no-git", "--dry-run"), data)


READS_RECORDS = (
    ("env", "list"),
    ("env", "info", "toy"),
    ("env", "verify"),
    ("env", "tree", "toy"),
    ("env", "update"),
    ("env", "sync", "--locked", "--offline"),
    ("env", "uninstall", "toy"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("environments/acme/toy.json", marks=pytest.mark.slow),
        "links/acme/toy.json",
        pytest.param("cache/wheels/*/release.json", marks=pytest.mark.slow),
    ],
)
def test_records_of_the_data_folder(name: str, place: Path, home: Path, attempt) -> None:
    (path,) = home.glob(name)
    text = path.read_text()
    for number, data in enumerate(some(changed_json(text), 25)):
        path.write_bytes(data)
        attempt(READS_RECORDS[number % len(READS_RECORDS)], data)
        path.parent.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def ends() -> Iterator[None]:
    """Fail where something waits for what never comes."""

    def fail(*_: object) -> None:
        pytest.fail("still waiting after 30 s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)  # a file with a hole: it takes no space


ENDLESS = (make_pipe, make_socket, make_endless, make_large)
READ_IN_FOLDERS = (
    "config.json",
    "aliases.toml",
    "namespaces/acme.toml",
    "index/acme/toy.jsonl",
    "status/acme/toy.json",
    "reserved.txt",
    f"artifacts/{toy_publication().release.wheel.filename}",
)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize("name", READ_IN_FOLDERS)
def test_what_never_ends_in_a_registry_is_not_waited_for(name, make, place, attempt) -> None:
    path = place.parent / "registry" / name
    path.unlink(missing_ok=True)
    make(path)
    attempt(READS_REGISTRY[READ_IN_FOLDERS.index(name)], b"")
    for command in (("env", "install", "toy", "--no-lock"), ("hub", "check", "../registry")):
        assert attempt(command, b"") != 0


@pytest.mark.slow
@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize("name", ["pyproject.toml", "datasets.json"])
def test_what_never_ends_in_a_project_is_not_waited_for(name, make, place, attempt) -> None:
    path = place / "project" / name
    path.unlink(missing_ok=True)
    make(path)
    attempt(("env", "validate", "project", "--level", "static"), b"")


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("make", ENDLESS)
def test_a_file_that_never_ends_is_refused_however_it_is_read(make, tmp_path) -> None:
    path = tmp_path / "file"
    make(path)
    for follows_link in (False, True):
        with pytest.raises(OSError, match=r"no plain file|longer than"):
            read_file(path, follows_link=follows_link)
    cache = HttpCache(tmp_path, "https://hub.example", lambda message: None)
    folder = tmp_path / sha256_of("https://hub.example")
    folder.mkdir()
    make(folder / sha256_of("https://hub.example/x"))
    assert cache.get("https://hub.example/x", max_bytes=1000) is None


def test_a_file_that_grows_while_it_is_read_is_read_to_the_limit() -> None:
    with pytest.raises(OSError, match="longer than 10 bytes"):
        read_file("/proc/self/status", max_bytes=10)  # whose size is 0, as the system says


def test_a_file_is_read_up_to_the_limit(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 200_000)
    (tmp_path / "link").symlink_to(path)
    assert read_file(path, max_bytes=200_000) == path.read_bytes()
    assert read_file(tmp_path / "link", follows_link=True) == path.read_bytes()
    with pytest.raises(OSError, match="a link"):
        read_file(tmp_path / "link")
