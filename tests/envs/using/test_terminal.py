"""Texts of others that would act on a terminal: shown as escapes, on both streams of every verb."""

import io
import json
import subprocess
import sys

import click
import pytest
import typer
from rich.console import Console

from telescope_cli.output import escaped_output
from telescope_core.base.terminal import acts_on_terminals, escaped
from telescope_core.errors import RegistryError

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b5n\x7f\u202egnp\r"
SHOWN = r"\u001b]0;owned\u0007\u001b[2J\u009b5n\u007f\u202egnp\u000d"


def test_only_lines_and_columns_are_left():
    assert escaped(f"a\tb\n{HOSTILE}") == f"a\tb\n{SHOWN}"
    assert json.loads(escaped(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE
    assert escaped("\u00fc \U0001f600 \u4e2d") == "\u00fc \U0001f600 \u4e2d"
    assert acts_on_terminals("a\nb")
    assert not acts_on_terminals("\u00fc")


@pytest.fixture
def record(home):
    """The record of an installed environment, with a summary that nobody checked."""
    path = home / "environments/acme/toy.json"
    path.parent.mkdir(parents=True)
    fields = {"owner": "acme", "name": "toy", "version": "1", "distribution": "x"}
    source = {"factory": "x:X", "wheel": {"sha256": "0" * 64}}
    release = {**fields, **source, "summary": HOSTILE}
    installation = {"registry": "file:x", "interpreter": sys.executable}
    path.write_text(json.dumps({"release": release, **installation}))


@pytest.mark.usefixtures("record", "published")
def test_a_list_is_safe_to_print(telescope):
    code, out, _ = telescope("env", "list", "--installed")
    assert code == 0
    assert r"\u001b]0;owned\u0007" in out
    assert not acts_on_terminals(out.replace("\n", ""))


@pytest.mark.usefixtures("record", "published")
def test_json_keeps_its_value(telescope):
    _, out, _ = telescope("env", "list", "--installed", "--json")
    assert not acts_on_terminals(out.replace("\n", ""))
    assert [row["summary"] for row in json.loads(out) if row["id"] == "acme/toy"] == [HOSTILE]


def test_messages_of_the_last_place_are_escaped(telescope, monkeypatch):
    def fails(name: str | None = None) -> None:
        raise RegistryError(HOSTILE)

    monkeypatch.setattr("telescope_cli.env.listing.open_registry", fails)
    code, out, err = telescope("env", "list")
    assert (code, out) == (RegistryError.exit_code, "")
    assert err == f"telescope: {SHOWN}\n"


@pytest.mark.usefixtures("home", "published")
def test_bad_lines_are_named_without_their_escapes(tmp_path):
    index = tmp_path / "registry/index/acme/toy.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"train":1', b'"\\u001b[2J":1'))
    done = subprocess.run(
        [sys.executable, "-c", "from telescope_cli.main import main; main()", "env", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "acme/toy" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("skipped: index/acme/toy.jsonl:1: splits: contains")


def test_no_way_around_it(monkeypatch):
    """Not even libraries that look for the bytes below a stream."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="replace"))
    with escaped_output():
        click.echo("click \x1b[2J", color=True)
        typer.echo("typer \x1b[2J", color=True)
        print("print \x1b[2J")
        sys.stdout.writelines(["lines \x1b[2J"])
        assert not hasattr(sys.stdout, "buffer")
        sys.stdout.flush()
    assert raw.getvalue().count(b"\\u001b[2J") == 4
    assert b"\x1b" not in raw.getvalue()


def test_libraries_do_not_style_what_is_escaped(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with escaped_output():
        Console().print("[bold]name[/bold]")
    assert terminal.getvalue() == "name\n"
