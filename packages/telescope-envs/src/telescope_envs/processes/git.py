"""Run git in a foreign folder, without starting anything that the folder names.

The configuration and the hooks of a repository name programs, and git starts some of them even to
show a status. So git gets a second view of the repository, in a temporary folder: the same objects,
refs and index, but no hooks, and of its configuration only settings that name no program. Git sees
no tokens either, and nothing of it is left when its time is over.
"""

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.errors import ConfigError
from telescope_envs.processes.running import end_group, passed_on

_TIME_LIMIT_S = 120.0
_MAX_OUTPUT_BYTES = 256 << 20
_MAX_ERRORS_BYTES = 64 << 10
_PASSED_ON = ("HOME", "XDG_CONFIG_HOME", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables for git besides those that an environment's code may see."""
_OF_THE_USER = {
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_CEILING_DIRECTORIES",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM",
}
"""Variables of git that are passed on. Git hooks set others, which name another repository."""
_OVERRIDES = {"core.fsmonitor": "false", "core.hooksPath": os.devnull, "log.showSignature": "false"}
_HARMLESS = re.compile(
    r"(?P<section>core|extensions|remote\.origin)\.(?P<name>repositoryformatversion|filemode"
    r"|ignorecase|symlinks|precomposeunicode|autocrlf|eol|safecrlf|sparsecheckout"
    r"|sparsecheckoutcone|objectformat|refstorage|url)"
)
_NOT_SEEN = {
    *("HEAD", "config", "config.worktree", "hooks"),
    *("commondir", "gitdir", "modules", "worktrees"),
}
"""Files of a repository that its second view does not share. HEAD is copied."""


class _Repository(NamedTuple):
    work_tree: Path
    git_folder: Path
    common_folder: Path
    """Git folder of the main work tree, if this is a further one; else `git_folder`."""


@contextmanager
def reading(folder: Path) -> Generator[dict[str, str]]:
    """Yield variables with which git reads the repository of `folder`, without running anything.

    With them git finds no repository where `why_unreadable` has a reason. Do not write with them.
    """
    with tempfile.TemporaryDirectory(prefix="telescope-git-") as scratch:
        view = Path(scratch) / "view"
        environ = {**_environ(), "GIT_DIR": str(view)}
        found = _discovered(folder)
        if isinstance(found, _Repository):
            _write_view(view, found)
            environ["GIT_WORK_TREE"] = str(found.work_tree)
        yield environ


def run_git(
    folder: Path, *arguments: str, environ: Mapping[str, str], given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, with the variables of `reading`; `given` is its input.

    Raises ConfigError if it does not end in time or prints more than any repository of
    environments has to say, and FileNotFoundError if it is not installed.
    """
    # Files take the input and the errors, so that only the output has to be read while git runs.
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
        asked.write(given)
        asked.seek(0)
        with subprocess.Popen(
            ["git", "-C", str(folder), *arguments],
            env=environ,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        ) as process:
            out = _output(process, f"git {arguments[0]}", folder)
        said.seek(0)
        err = said.read(_MAX_ERRORS_BYTES)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _output(process: "subprocess.Popen[bytes]", what: str, folder: Path) -> bytes:
    """Return git's output when it has ended; no process that it started is left."""
    assert process.stdout is not None, "it is a pipe"
    is_late = threading.Event()

    def end_it() -> None:
        is_late.set()
        end_group(process)

    watch = threading.Timer(_TIME_LIMIT_S, end_it)
    watch.start()
    try:
        out = process.stdout.read(_MAX_OUTPUT_BYTES + 1)
        if len(out) > _MAX_OUTPUT_BYTES:
            raise ConfigError(
                f"{what} printed more than {_MAX_OUTPUT_BYTES >> 20} MiB in {folder}, which a "
                "repository of environments does not need; look at what it holds"
            )
        process.wait()
    finally:
        watch.cancel()
        end_group(process)
    if is_late.is_set():
        raise ConfigError(
            f"{what} did not end within {_TIME_LIMIT_S:g} s in {folder}; run it there to see "
            "what it waits for"
        )
    return out


def why_unreadable(folder: Path) -> str:
    """Return git's message if it can read no repository around `folder`; else empty."""
    found = _discovered(folder)
    return "" if isinstance(found, _Repository) else found


def _environ() -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*_PASSED_ON, *_OF_THE_USER) if name in os.environ}
    settings = {"GIT_CONFIG_COUNT": str(len(_OVERRIDES))}
    for number, (key, value) in enumerate(_OVERRIDES.items()):
        settings |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    # Objects that are missing are not fetched: their remote may be any program.
    quiet = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    return {
        **passed_on(),
        **kept,
        **settings,
        **quiet,
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
    }


def _discovered(folder: Path) -> _Repository | str:
    """Return the repository around `folder`, or git's message if there is none to read."""
    question = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    # This command starts nothing, whatever the configuration says.
    done = run_git(folder, "rev-parse", "--path-format=absolute", *question, environ=_environ())
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or len(lines) != len(_Repository._fields):
        return done.stderr.decode(errors="replace").strip() or "not a git repository"
    return _Repository(*map(Path, lines))


def _write_view(view: Path, repository: _Repository) -> None:
    view.mkdir()
    for folder in (repository.common_folder, repository.git_folder):
        for name in set(os.listdir(folder)) - _NOT_SEEN:
            if name != "info" or not (view / name).is_symlink():
                (view / name).unlink(missing_ok=True)
                (view / name).symlink_to(folder / name)
    shutil.copyfile(repository.git_folder / "HEAD", view / "HEAD")
    config = repository.common_folder / "config"
    (view / "config").write_text("".join(_harmless_lines(config, view.parent)), encoding="utf-8")


def _harmless_lines(config: Path, folder: Path) -> Iterator[str]:
    arguments = ("config", "--file", str(config), "--null", "--list")
    listed = run_git(folder, *arguments, environ=_environ()).stdout.decode(errors="replace")
    for entry in listed.split("\0"):
        key, separator, value = entry.partition("\n")
        found = _HARMLESS.fullmatch(key)
        if found is None:
            continue
        section, _, inner = found["section"].partition(".")
        head = f'[{section} "{inner}"]' if inner else f"[{section}]"
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        # A key without a value, which git reads as true, is written as it was.
        yield (
            f'{head}\n\t{found["name"]} = "{quoted}"\n'
            if separator
            else f"{head}\n\t{found['name']}\n"
        )
