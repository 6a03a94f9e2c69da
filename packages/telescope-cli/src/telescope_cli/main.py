"""The `telescope` command: a table of verbs, each imported only when it is called.

This file also holds the boundary where an error becomes a message and an exit code.
"""

import atexit
import errno
import gc
import io
import os
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from signal import SIGINT
from typing import Annotated, NoReturn

import typer

from telescope_cli.output import make_streams_usable
from telescope_cli.verbs import Verb, command_of, verb_app
from telescope_core.base.addresses import reached_directly
from telescope_core.base.collector import rare_collections
from telescope_core.base.first_process import go_on_below_first
from telescope_core.base.interrupts import Interrupted, asked, cut_short, taken

UNUSABLE_PATHS = {
    errno.EROFS: "name a place that can be written",
    errno.EACCES: "name a path for which this user has the rights",
    errno.EPERM: "name a path for which this user has the rights",
    errno.ENOTDIR: "expected a folder where a file is",
    errno.EISDIR: "expected a file",
    errno.EEXIST: "name another path, or remove it",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "a link of this path leads back to itself",
}
"""Errors of the system about a path that somebody gave -> what to do; others may be defects."""
_MOST_OF_PATH = 200
VERBS = {
    "agent": Verb(".agent:app", "Install agent programs that play environments in sandboxes."),
    "compare": Verb(
        ".compare:compare_command",
        "Compare two runs: settings that differ, evals and rewards in pairs.",
    ),
    "env": Verb(".env.app:app", "Find, install, check and remove environments."),
    "eval": Verb(
        ".eval.command:eval_command",
        "Measure a model on an environment: pass@k with intervals.",
        settings="environments",
    ),
    "eval compare": Verb(
        ".eval.compare:compare_command",
        "Compare two evals of the same examples, paired by example.",
    ),
    "export": Verb(
        ".export:export_command",
        "Convert checkpoints to Hugging Face format, and push them to the Hub.",
        needs="telescope_train",
    ),
    "hub": Verb(".hub.app:app", "Manage a registry of environments: check, render and serve it."),
    "model": Verb(
        ".model:app",
        "Bring models of other formats into the one that is trained and served.",
        needs="telescope_train",
    ),
    "rescore": Verb(
        ".rescore:rescore_command",
        "Grade the rollouts of a run with another version of an environment.",
        settings="environment",
    ),
    "sandbox": Verb(".sandbox:app", "Check the sandboxes in which programs of models run."),
    "sft": Verb(
        ".sft:sft_command",
        "Train on gold answers of environments, or on a dataset of conversations.",
        settings="sft",
        needs="telescope_train",
    ),
    "simulate": Verb(
        ".simulate:simulate_command",
        "Estimate what a run would do on GPUs that are not here.",
        settings="train",
        needs="telescope_train",
    ),
    "train": Verb(
        ".train:train_command",
        "Train a model with reinforcement learning on environments.",
        settings="train",
        needs="telescope_train",
    ),
    "ui": Verb(
        ".ui:ui_command",
        "Serve the data of runs: curves, rollouts, tokens, timelines, logs.",
        needs="telescope_ui",
    ),
    "doctor": Verb(".doctor:doctor_command", "Say what went wrong in a run, and what to try."),
    "watch": Verb(
        ".watch:watch_command",
        "Watch a run that goes on, from any terminal.",
        needs="telescope_train",
    ),
}
EPILOG = """Examples:

  telescope env install math-reasoning countdown

  telescope eval math-reasoning --model ./my-model --rollouts 8 --k 1,4

  telescope train run.toml --dry-run

`telescope VERB --help` explains one verb."""


app = verb_app(VERBS, epilog=EPILOG, add_completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # 40 ms, which no other command should wait for

        typer.echo(f"telescope {version('telescope-cli')}")
        raise typer.Exit


@app.callback()
def telescope(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Environments, evals and reinforcement learning for language models."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: `arguments`, and raise SystemExit; or the process's, and end it."""
    # For all that this process starts, by whatever library it speaks HTTP or gRPC.
    os.environ.update(reached_directly(os.environ))
    if sys.getfilesystemencoding() != "utf-8":
        # Libraries read their own files, which are UTF-8, in the encoding of the locale.
        os.environ["PYTHONUTF8"] = "1"
    if arguments is not None:
        with taken():
            return _main(arguments)
    make_streams_usable()
    go_on_below_first()
    code: object = 0
    with taken(for_good=True):
        try:
            _main(None)
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException as error:  # noqa: BLE001 - it is printed as Python prints it
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
    if not isinstance(code, int):
        with suppress(OSError):
            sys.stderr.write(f"{code}\n")
        code = 1
    _leave(code)


def _main(arguments: Sequence[str] | None) -> None:
    try:
        command = command_of(app)
        # Also while a command imports torch and others, whose objects stay: to look through them
        # again and again would take a sixth of the time until it begins.
        with rare_collections():
            command(None if arguments is None else list(arguments), prog_name="telescope")
    except KeyboardInterrupt as interrupt:
        _end_as_interrupted(interrupt)
    except SystemExit as ended:
        # Typer makes an exit of it, without a word.
        exit_ = ended.__context__
        if exit_ is not None and isinstance(exit_.__cause__, KeyboardInterrupt):
            _end_as_interrupted(exit_.__cause__)
        raise
    except Exception as error:  # the last place to turn an error into a clear message
        from telescope_core.base.errors import TelescopeError
        from telescope_core.base.terminal import escaped

        is_ours = isinstance(error, TelescopeError)
        if (number := cut_short()) is not None:
            # Libraries, such as pydantic's in Rust, make another error of the one that ends them.
            said = f"; {escaped(str(error))}" if is_ours else ""
            _end_as_interrupted(Interrupted(number, f"interrupted by {number.name}{said}"))
        if lacking := _lack_behind(error):
            said = str(error)
            _fail(escaped(f"{said}; {lacking}" if said else lacking), 1)
        if is_ours:
            _fail(escaped(str(error)), error.exit_code)
        if isinstance(error, OSError):
            _fail_for_system(error)
        # Python has no type of its own for it either.
        if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":
            _fail(
                "no home folder is known, for ~ in a path or for what is kept there by default; "
                "set HOME, or write the path",
                2,
            )
        raise


def _lack_behind(error: BaseException) -> str:
    """Return what to do if the system refused memory or a thread, also as the cause of `error`."""
    cause: BaseException | None = error
    while cause is not None:
        code = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, MemoryError) or code == errno.ENOMEM:
            return (
                "no memory is left that this process may use: lower --concurrency (in training: "
                "max_open_rollouts) or what it holds at once, end other programs, or raise the "
                "limit (ulimit -v, or the container's)"
            )
        # Python has no type of its own for it.
        if isinstance(cause, RuntimeError) and str(cause) == "can't start new thread":
            return (
                "no thread can be started: this user or container has as many processes and "
                "threads as it may, or no memory is left; end others, or raise the limit (ulimit "
                "-u, or the container's)"
            )
        cause = cause.__cause__
    return ""


def _fail_for_system(error: OSError) -> None:
    """End with one sentence for an error of the disk, a path or a limit; others may be ours."""
    from telescope_core.base.errors import NoRoomError
    from telescope_core.base.open_files import advice_for
    from telescope_core.base.terminal import foreign
    from telescope_core.records.room import too_large

    # A stream that is written to, such as the standard output, is no file with a name.
    path = error.filename2 or error.filename
    place = foreign(os.fsdecode(path), _MOST_OF_PATH) if isinstance(path, str | bytes) else ""
    if too_many := advice_for(error):
        _fail(f"cannot open {place or 'a file or a connection'}: {too_many}", 1)
    if error.errno in NoRoomError.CODES:
        why = too_large() if error.errno == errno.EFBIG else error.strerror
        _fail(f"cannot write {place or 'the output, or a file of a library'}: {why}", 1)
    if place and error.errno in UNUSABLE_PATHS:
        said = f"cannot use {place}: {error.strerror}; {UNUSABLE_PATHS[error.errno]}"
        _fail(said, 1 if error.errno == errno.EROFS else 2)
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            _fail("the present folder has been removed; change to another one with cd", 2)


def _end_as_interrupted(error: KeyboardInterrupt) -> NoReturn:
    ended = error if isinstance(error, Interrupted) else Interrupted(asked() or SIGINT)
    _fail(str(ended), ended.exit_code)


def _fail(message: str, exit_code: int) -> NoReturn:
    # Nobody may be there to read it, as after SIGHUP of a terminal.
    with suppress(OSError):
        sys.stderr.write(f"telescope: {message}\n")
    raise SystemExit(exit_code)


def _leave(code: int) -> NoReturn:
    """End this process with exit code `code`, when all work of the command is done.

    This does the same as Python, but without destructors of modules and of libraries in C: those of
    Ray and torch may crash, which would change the exit code. Necessary work at the end, such as
    ending child processes, is in functions that libraries register with `atexit`.
    """
    # Python has no public names for the two that its own end begins with.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for one in gc.get_objects():
        # A file that the code of an environment has left open would be written by its destructor.
        if type(one) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):
                if stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                    one.flush()
    try:
        # None where the command was started without a standard output.
        if (output := sys.__stdout__) is not None and not output.closed:
            output.flush()
    except OSError as error:
        # A program that closes a pipe, such as `head`, has read enough.
        if code == 0 and not isinstance(error, BrokenPipeError):
            with suppress(OSError):
                sys.stderr.write(f"telescope: cannot write the output: {error.strerror}\n")
        code = code or 1
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
