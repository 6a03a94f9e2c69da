"""The `telescope` command: its table of verbs, its errors, `telescope env`."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.signals import heed_all_but

from telescope_cli import main as cli
from telescope_cli import verbs
from telescope_cli.env.app import VERBS as ENV_VERBS
from telescope_cli.hub.app import VERBS as HUB_VERBS
from telescope_core.errors import ConfigError, EnvironmentLoadError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def telescope(capsys, monkeypatch):
    """Run the command in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(ROOT / "registry"))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run


@pytest.mark.parametrize(("encoding", "inherited"), [("iso8859-1", "1"), ("utf-8", "0")])
def test_what_a_command_starts_reads_its_files_as_utf_8(
    telescope, monkeypatch, encoding, inherited
):
    """Ranks, servers and workers import libraries that read files in the locale's encoding."""
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    telescope("--version")
    assert os.environ["PYTHONUTF8"] == inherited


def test_help_lists_the_verbs_and_imports_none_of_them():
    program = (
        "import sys\n"
        "from telescope_cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "loaded = {'rich', 'pydantic', 'httpx', 'torch', 'telescope_envs', 'asyncio'}\n"
        "assert not loaded & set(sys.modules), loaded & set(sys.modules)\n"
        "print('and it was asked')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("and it was asked\n")
    assert "Find, install, check and remove environments." in done.stdout
    assert "telescope env install math-reasoning countdown" in done.stdout
    assert "--install-completion" in done.stdout


def test_every_verb_that_is_present_can_be_loaded(telescope):
    tables = [((name,), verb) for name, verb in cli.VERBS.items()]
    tables += [(("env", name), verb) for name, verb in ENV_VERBS.items()]
    tables += [(("hub", name), verb) for name, verb in HUB_VERBS.items()]
    for names, verb in tables:
        if find_spec(verb.module) is not None:
            code, out, _ = telescope(*names, "--help")
            assert code == 0
            assert "Usage: telescope" in out
            takes_files = names[-1] in ("train", "sft", "simulate")
            assert ("[FILE]... [OPTIONS]" in out.splitlines()[0]) == takes_files


def test_the_help_fits_a_terminal_of_80_columns(telescope, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = telescope("--help")
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_a_verb_without_its_code_is_not_shown(telescope, monkeypatch):
    ghost = cli.Verb(".ghost:run", "Not there.")
    monkeypatch.setitem(cli.VERBS, "ghost", ghost)
    assert "ghost" not in telescope("--help")[1]
    assert telescope("ghost")[0] == 2


def test_a_verb_without_its_package_says_what_to_install(telescope, monkeypatch):
    needy = cli.Verb(".env:app", "Needs it.", needs="telescope_train")
    monkeypatch.setattr(
        verbs, "find_spec", lambda name: None if name == needy.needs else find_spec(name)
    )
    monkeypatch.setitem(cli.VERBS, "needy", needy)
    code, _, err = telescope("needy")
    assert code == 2
    assert "pip install 'telescope-cli[train]'" in err


@pytest.mark.parametrize("line", ["telescope evla countdown --mod", "telescope needy now --mod"])
def test_nothing_is_said_to_a_shell_that_completes(telescope, monkeypatch, line):
    needy = cli.Verb(".env:app", "Needs it.", needs="telescope_missing")
    monkeypatch.setitem(cli.VERBS, "needy", needy)
    monkeypatch.setenv("_TELESCOPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", "3")
    _, out, err = telescope()
    assert (out.strip(), err) == ("", "")


def test_the_page_names_the_extra_that_brings_it(telescope, monkeypatch):
    monkeypatch.setattr(
        verbs, "find_spec", lambda name: None if name == "telescope_ui" else find_spec(name)
    )
    code, _, err = telescope("ui")
    assert code == 2
    assert "pip install 'telescope-cli[ui]'" in err


def test_version(telescope):
    assert telescope("--version") == (0, "telescope 0.1.0\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("evn",), 2, "unknown command 'evn'; did you mean 'env'"),
        (("env", "instal"), 2, "unknown command 'instal'; did you mean 'install'"),
        (("serve",), 2, "unknown command 'serve'; did you mean 'telescope hub serve'?"),
        (("hub", "push"), 2, "unknown command 'push'; did you mean 'telescope env push'?"),
        (("create",), 2, "did you mean 'telescope hub token create'?"),
        (("install",), 2, "mean 'telescope agent install' or 'telescope env install'?"),
        (("env", "compare"), 2, "mean 'telescope compare' or 'telescope eval compare'?"),
        (("env", "install"), 2, "NAME"),
        (("env", "install", "math-reasoning", "--quick"), 2, "--quick"),
        (("env", "info", "math-reasonin"), 2, "did you mean 'math-reasoning'"),
        (("env", "info", "math-reasoning@9"), 4, "published versions: 0.1.0"),
        (("env", "list", "--registry", "/no/such"), 2, "is not a folder"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(telescope, arguments, code, message):
    got, _, err = telescope(*arguments)
    assert got == code
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_list_and_info_for_people_and_programs(telescope):
    code, out, _ = telescope("env", "list")
    assert code == 0
    assert "telescope/countdown" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    rows = json.loads(telescope("env", "list", "--json")[1])
    assert {"telescope/countdown", "telescope/math-reasoning"} <= {row["id"] for row in rows}
    assert "0 to 1, solved at 1 or more" in telescope("env", "info", "countdown")[1]
    about = json.loads(telescope("env", "info", "countdown", "--json")[1])
    assert about["reward"] == {"minimum": 0.0, "maximum": 1.0, "success": 1.0}
    assert about["status"]["yanked"] == {}


RUN_MAIN = "from telescope_cli.main import main; main()"
RUN_PROGRAM = """
import os
from telescope_cli.output import make_streams_usable
from telescope_envs.processes.running import run_program
make_streams_usable()
done = run_program(["echo", "it ran"], environ=dict(os.environ), limit_s=60, late="late")
assert done.stdout == "it ran\\n", done
"""


def run_in_shell(program: str, redirected: str = "", *arguments: str, **environ: str):
    """Run `python -c program arguments` with streams redirected as a shell writes it."""
    return subprocess.run(
        [
            "/bin/sh",
            "-c",
            f'exec "$@" {redirected}',
            "sh",
            sys.executable,
            "-c",
            program,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TELESCOPE_REGISTRY": str(ROOT / "registry"), **environ},
    )


@pytest.mark.parametrize(
    ("program", "arguments", "redirected", "code"),
    [
        (RUN_MAIN, "--version", "2>&-", 0),
        (RUN_MAIN, "foo", "2>&-", 2),
        (RUN_MAIN, "agent list", ">&-", 0),
        (RUN_MAIN, "agent list", "<&- >&- 2>&-", 0),
        (RUN_PROGRAM, "", "<&-", 0),
    ],
)
def test_a_closed_stream_changes_nothing_else(program, arguments, redirected, code):
    done = run_in_shell(program, redirected, *arguments.split())
    assert done.returncode == code, done.stderr
    assert not done.stderr


def test_characters_that_the_output_cannot_hold_are_replaced():
    done = run_in_shell(RUN_MAIN, "", "env", "search", "\u00fc", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "matches '?'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("doctor", "n" * 300), "File name too long"),
        (("env", "init", "foo", "--dir", "file/x"), "cannot use file/x: Not a directory"),
        (("hub", "serve", "--data", "file"), "cannot use file: File exists"),
    ],
)
def test_a_path_that_cannot_be_used_is_one_message(
    telescope, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code, _, err = telescope(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="it needs a place without folders")
def test_a_home_where_no_folder_can_be_made_is_one_message(telescope, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", "/proc/x")
    code, _, err = telescope("env", "install", "math-reasoning", "--no-lock")
    assert code == 2
    assert "cannot be made: /proc takes no new folders; name another place" in err
    assert "Traceback" not in err


def raising(error: Exception):
    """Return what builds a command that raises `error`."""

    def broken(*_: object, **__: object) -> None:
        raise error

    return lambda app: broken


def test_a_present_folder_that_was_removed(telescope, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(cli, "command_of", raising(FileNotFoundError(errno.ENOENT, "No such file")))
    code, _, err = telescope()
    assert code == 2
    assert "the present folder has been removed" in err


@pytest.mark.parametrize(
    ("path", "place"), [("rollouts.jsonl", "rollouts.jsonl"), (None, "a file or a connection")]
)
def test_too_many_open_files_are_one_message(telescope, monkeypatch, path, place):
    error = OSError(errno.EMFILE, "Too many open files", path)
    monkeypatch.setattr(cli, "command_of", raising(error))
    code, _, err = telescope()
    assert (code, err.count("\n")) == (1, 1)
    assert f"cannot open {place}: this process has as many files" in err
    assert "raise the limit with ulimit -n, or lower --concurrency" in err


def caused_by(cause: Exception) -> Exception:
    error = EnvironmentLoadError("sums cannot be loaded")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (MemoryError(), ("no memory is left", "in training: max_open_rollouts", "ulimit -v")),
        (MemoryError("Unable to allocate 9 GiB"), ("Unable to allocate 9 GiB", "no memory is")),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ("no memory is left",)),
        (caused_by(MemoryError()), ("sums cannot be loaded", "no memory is left")),
        (RuntimeError("can't start new thread"), ("no thread can be started", "ulimit -u")),
        (caused_by(RuntimeError("can't start new thread")), ("sums cannot", "ulimit -u")),
    ],
)
def test_memory_or_threads_that_the_system_refuses_are_one_message(
    telescope, monkeypatch, error, facts
):
    monkeypatch.setattr(cli, "command_of", raising(error))
    code, _, err = telescope()
    assert (code, err.count("\n"), "Traceback" in err) == (1, 1, False)
    assert all(fact in err for fact in facts)


@pytest.mark.parametrize("verb", [["env", "validate"], ["eval", "countdown", "--model"]])
def test_a_home_folder_that_nobody_has_is_one_message(telescope, verb):
    code, _, err = telescope(*verb, "~nobody-has-this-name/some")
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False)
    assert "no home folder is known, for ~ in a path" in err


def test_commands_that_texts_of_the_packages_name_exist():
    known = {"env": ENV_VERBS, "hub": HUB_VERBS}
    told = [
        (path.name, *found)
        for path in (ROOT / "packages").glob("*/src/**/*.py")
        for found in re.findall(r"telescope (env|hub) ([a-z][a-z-]+)", path.read_text("utf-8"))
    ]
    assert len(told) > 50
    assert not [one for one in told if one[2] not in known[one[1]]]


def test_other_errors_keep_their_code(telescope, monkeypatch):
    monkeypatch.setattr(cli, "command_of", raising(caused_by(RuntimeError("no such thing"))))
    assert telescope()[0] == 3


def test_a_file_system_that_is_only_read(telescope, monkeypatch):
    error = OSError(errno.EROFS, "Read-only file system", "partial", None, "report.html")
    monkeypatch.setattr(cli, "command_of", raising(error))
    code, _, err = telescope()
    assert code == 1
    assert "cannot use report.html: Read-only file system" in err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("SchemaError: Interrupted"), "interrupted by SIGTERM"),
        (ConfigError("no such thing"), "interrupted by SIGTERM; no such thing"),
    ],
)
def test_an_error_that_a_library_made_of_a_signal(telescope, monkeypatch, error, words):
    def broken(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise error from None

    monkeypatch.setattr(cli, "command_of", lambda app: broken)
    code, _, err = telescope()
    assert code == 143
    assert err.splitlines()[-1] == f"telescope: {words}"


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from telescope_cli.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_is_imported_ends_it_without_words():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=heed_all_but,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a defect"),
        OSError(errno.EBADF, "Bad file descriptor", "file"),
        OSError(errno.ENOENT, "No such file or directory", "file"),
        OSError(errno.EISDIR, "Is a directory"),
    ],
)
def test_a_defect_is_not_hidden(monkeypatch, error):
    monkeypatch.setattr(cli, "command_of", raising(error))
    with pytest.raises(type(error)):
        cli.main([])
