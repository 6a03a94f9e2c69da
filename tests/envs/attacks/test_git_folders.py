"""A folder with a git repository in it that somebody else made: reading it starts nothing of it."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.envs.attacks.test_programs import until_gone
from tests.envs.projects import toy_publication, write_project

import telescope_envs
from telescope_cli.main import main
from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.publish.build import source_files
from telescope_envs.publish.source import (
    changed_files,
    committed_source,
)
from telescope_envs.registry import Registry
from telescope_envs.rules.history import check_history

ME = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *arguments: str) -> str:
    """Run git as the person who prepares the folder."""
    command = ["git", *ME, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x")


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """The file that a started program makes."""
    return tmp_path / "started"


@pytest.fixture
def trap(tmp_path: Path, started: Path) -> str:
    """A program that notes that it was started."""
    path = tmp_path / "trap.sh"
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {started}\ncat\n')
    path.chmod(0o755)
    return str(path)


def set_traps(folder: Path, trap: str) -> None:
    """Make every setting and hook of the repository start the trap that can."""
    top = Path(git(folder, "rev-parse", "--show-toplevel").strip())
    for key, value in {
        "core.fsmonitor": trap,
        "core.hooksPath": str(top / ".git" / "hooks"),
        "core.pager": trap,
        "core.editor": trap,
        "core.sshCommand": trap,
        "core.askPass": trap,
        "core.gitProxy": trap,
        "core.alternateRefsCommand": trap,
        "gpg.program": trap,
        "gpg.ssh.program": trap,
        "gpg.x509.program": trap,
        "log.showSignature": "true",
        "diff.external": trap,
        "diff.evil.command": trap,
        "diff.evil.textconv": trap,
        "filter.evil.clean": trap,
        "filter.evil.smudge": trap,
        "filter.evil.process": trap,
        "filter.evil.required": "true",
        "credential.helper": f"!{trap}",
        "protocol.ext.allow": "always",
        "remote.origin.uploadpack": trap,
        "remote.origin.url": f"ext::{trap}",
        "remote.origin.promisor": "true",
        "alias.log": f"!{trap}",
        "alias.status": f"!{trap}",
        "pager.log": trap,
        "submodule.recurse": "true",
        "status.submoduleSummary": "true",
    }.items():
        git(folder, "config", key, value)
    # The rest is in a file of its own, as a repository may include one.
    (top / ".git" / "more").write_text(f'[gpg "openpgp"]\n\tprogram = {trap}\n')
    git(folder, "config", "include.path", "more")
    hooks = ("post-index-change", "reference-transaction", "pre-auto-gc", "fsmonitor-watchman")
    (top / ".git" / "hooks").mkdir(exist_ok=True)
    for hook in hooks:
        shutil.copy(trap, top / ".git" / "hooks" / hook)
    (top / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil\n")


def sign_last_commit(folder: Path) -> None:
    """Give the last commit a signature, which `log` shows with the program that is configured."""
    text = git(folder, "cat-file", "commit", "HEAD")
    head, _, message = text.partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n x\n -----END PGP SIGNATURE-----"
    done = subprocess.run(
        ["git", "hash-object", "-t", "commit", "-w", "--stdin"],
        cwd=folder,
        input=f"{head}\n{signature}\n\n{message}",
        capture_output=True,
        text=True,
        check=True,
    )
    git(folder, "update-ref", "HEAD", done.stdout.strip())


@pytest.fixture
def evil_registry(registry: Registry, trap: str, started: Path) -> Path:
    registry.store.publish(toy_publication())
    root = Path(registry.address)
    git(root, "init", "-qb", "main")
    commit(root)
    registry.store.publish(toy_publication("0.2.0"))
    commit(root)
    sign_last_commit(root)
    set_traps(root, trap)
    assert subprocess.run(["git", "status"], cwd=root, capture_output=True, check=False)
    assert started.exists(), "without protection, git starts what the folder names"
    started.unlink()
    return root


@pytest.fixture
def evil_project(tmp_path: Path, trap: str, started: Path) -> Path:
    project = write_project(tmp_path / "project")
    git(project, "init", "-qb", "main")
    inner = project / "inner"
    inner.mkdir()
    (inner / "file").write_text("x")
    git(inner, "init", "-qb", "main")
    commit(inner)
    commit(project)
    for repository in (inner, project):
        set_traps(repository, trap)
    code = project / "telescope_env_acme_toy" / "__init__.py"
    os.utime(code, (1, 1))  # so git has to read it again, through a filter
    subprocess.run(["git", "status"], cwd=project, capture_output=True, check=False)
    assert started.exists(), "without protection, git starts what the folder names"
    started.unlink()
    os.utime(code, (2, 2))
    return project


@pytest.mark.slow
def test_checking_a_registry_starts_nothing_of_its_repository(evil_registry, started, monkeypatch):
    report = check_history(evil_registry, against="HEAD~1")
    assert report.num_commits == 2
    assert report.findings == []
    index = evil_registry / "index" / "acme" / "toy.jsonl"
    index.write_text(index.read_text().replace("0.1.0", "0.1.1"))
    assert [one.check for one in check_history(evil_registry).findings] == ["history"]
    assert not started.exists()


def test_objects_that_are_missing_are_fetched_from_nowhere(evil_registry, started) -> None:
    blob = git(evil_registry, "rev-parse", "HEAD:index/acme/toy.jsonl").strip()
    (evil_registry / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    git(evil_registry, "config", "extensions.partialClone", "origin")
    git(evil_registry, "config", "core.repositoryFormatVersion", "1")
    with pytest.raises(RegistryError, match="lacks object"):
        check_history(evil_registry)
    assert not started.exists()


READERS: list[Callable[[Path], object]] = [
    source_files,
    changed_files,
    lambda project: committed_source(project, allow_no_git=False),
]


@pytest.mark.parametrize("read", READERS)
def test_reading_a_project_starts_nothing_of_its_repository(read, evil_project, started) -> None:
    before = {path: path.stat().st_mtime_ns for path in (evil_project / ".git").rglob("*")}
    assert read(evil_project) is not None
    assert not started.exists()
    assert {path: path.stat().st_mtime_ns for path in (evil_project / ".git").rglob("*")} == before


@pytest.mark.slow
def test_what_git_says_of_an_ordinary_project_is_the_same(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    git(project, "init", "-qb", "main")
    (project / ".gitignore").write_text("*.log\n")
    commit(project)
    git(project, "remote", "add", "origin", "git@example.org:acme/toy.git")
    (project / ".git" / "info" / "exclude").write_text("*.tmp\n")
    for name in ("a.log", "b.tmp"):
        (project / name).write_text("x")
    assert changed_files(project) == []
    source = committed_source(project, allow_no_git=False)
    assert source.repository == "https://example.org/acme/toy"
    assert source.commit == git(project, "rev-parse", "HEAD").strip()
    (project / "new.py").write_text("x")
    assert changed_files(project) == ["new.py"]
    assert Path("new.py") in source_files(project)
    (project / "new.py").unlink()
    shutil.copytree(project, tmp_path / "copy")
    git(project, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    assert committed_source(tmp_path / "tree", allow_no_git=False) == source
    git(project, "pack-refs", "--all")
    assert committed_source(project, allow_no_git=False) == source
    inner = project / "telescope_env_acme_toy"
    assert source_files(project) == source_files(tmp_path / "copy")
    assert changed_files(inner) == []


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_CONFIG_COUNT"])
def test_variables_of_another_git_do_not_mislead(name, tmp_path: Path, monkeypatch) -> None:
    # As in a hook of git, which sets these for what it starts.
    project = write_project(tmp_path / "project")
    git(project, "init", "-qb", "main")
    commit(project)
    wanted = source_files(project)
    monkeypatch.setenv(name, str(tmp_path / "other"))
    assert source_files(project) == wanted
    assert changed_files(project) == []


@pytest.mark.parametrize("text", ["[", "[core]\n\tbare = x\n", "\0", '[remote "origin"]\n\turl\n'])
def test_a_configuration_that_cannot_be_read_is_one_message(text, registry, capsys) -> None:
    root = Path(registry.address)
    git(root, "init", "-qb", "main")
    commit(root)
    (root / ".git" / "config").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["hub", "check", str(root)])
    assert ended.value.code in (0, 1, 4)
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def own_git(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Put a script before git on the path; it finds the real one as `$real`."""

    def write(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "git").write_text(f"#!/bin/sh\nreal={shutil.which('git')}\n{script}\n")
        (folder / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return write


EVERY_READER: list[Callable[[Path], object]] = [*READERS, check_history]


@pytest.mark.parametrize("read", EVERY_READER)
def test_git_sees_no_token(read, own_git, tmp_path: Path, monkeypatch) -> None:
    project = write_project(tmp_path / "project")
    git(project, "init", "-qb", "main")
    commit(project)
    for number, name in enumerate(
        ("TELESCOPE_HUB_TOKEN", "HF_TOKEN", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "GIT_ASKPASS")
    ):
        monkeypatch.setenv(name, f"seen-{number}")
    seen = tmp_path / "seen"
    own_git(f'env >> {seen}\nexec "$real" "$@"')
    assert read(project) is not None
    assert "GIT_TERMINAL_PROMPT=0" in seen.read_text()
    assert "seen-" not in seen.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["rev-parse", "ls-files", "status", "log"])
def test_a_git_that_does_not_end_is_one_message_and_nothing_of_it_is_left(
    waits_for, own_git, registry, tmp_path: Path, monkeypatch
) -> None:
    registry.store.publish(toy_publication())
    root = write_project(Path(registry.address))
    git(root, "init", "-qb", "main")
    commit(root)
    note = tmp_path / "pid"
    own_git(
        f'case " $* " in *" {waits_for} "*) sleep 600 & echo $! > {note}.part\n'
        f'mv {note}.part {note}; wait;; esac\nexec "$real" "$@"'
    )
    read = {"ls-files": source_files, "status": changed_files}.get(waits_for, check_history)
    limit_s = 0.2
    while not note.exists():  # until the limit was long enough for it to begin
        monkeypatch.setattr("telescope_envs.processes.git._TIME_LIMIT_S", limit_s)
        with pytest.raises(ConfigError, match=r"git [a-z-]+ did not end within .* run it there"):
            read(root)
        limit_s *= 2
        assert limit_s < 120
    until_gone(int(note.read_text()))


@pytest.mark.parametrize("floods", ["rev-parse", "ls-files", "status", "log"])
def test_a_git_that_prints_without_an_end_is_one_message_and_is_ended(
    floods, own_git, registry, tmp_path: Path, monkeypatch
) -> None:
    registry.store.publish(toy_publication())
    root = write_project(Path(registry.address))
    git(root, "init", "-qb", "main")
    commit(root)
    note = tmp_path / "pid"
    own_git(f'case " $* " in *" {floods} "*) echo $$ > {note}; exec yes;; esac\nexec "$real" "$@"')
    monkeypatch.setattr("telescope_envs.processes.git._MAX_OUTPUT_BYTES", 3 << 20)
    read = {"ls-files": source_files, "status": changed_files}.get(floods, check_history)
    with pytest.raises(ConfigError, match=rf"git {floods}.* 3 MiB"):
        read(root)
    until_gone(int(note.read_text()))


def test_git_is_started_only_where_this_is_known() -> None:
    package = Path(telescope_envs.__file__).parent
    starts = {
        path for path in package.rglob("*.py") if '["git"' in path.read_text(encoding="utf-8")
    }
    # The commit in publish/source.py is the author's own act, with the hooks of their repository.
    assert starts == {package / "publish" / "source.py", package / "processes" / "git.py"}
