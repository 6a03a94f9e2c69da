"""`telescope ui` as a program: it says where it is, ends when asked, and writes static folders."""

import base64
import gzip
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.processes import Program
from tests.ui.recorded import MARKUP, write_run

from telescope_cli.main import main
from telescope_core.base.errors import ConfigError
from telescope_ui.web.export import export_one_file, export_runs

CODE = "from telescope_cli.main import main; main()"
LIMIT_S = 60


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "quickstart")
    (tmp_path / "other" / "models").mkdir(parents=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "host"), [([], "127.0.0.1"), (["--host", "::1"], "::1"), (["--host=[::1]"], "::1")]
)
def test_it_says_where_it_is_and_ends_when_it_is_interrupted(place, options, host):
    command = [sys.executable, "-c", CODE, "ui", "--json", "--port", "0", *options]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        said = json.loads(running.stdout.readline())
        port = int(said["address"].rpartition(":")[2])
        assert urlsplit(said["address"]).hostname == host
        connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        headers = {"authorization": f"Bearer {said['token']}", "accept": "application/json"}
        connection.request("GET", "/runs/quickstart/rollouts", headers=headers)
        assert json.loads(connection.getresponse().read())["total"] == 36
        # An open page is told of changes as long as it is open, and must not hold up the end.
        connection.request("GET", "/live", headers=headers)
        assert connection.getresponse().readline() == b"event: ready\n"
        assert said["pid"] == running.pid
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=LIMIT_S)
        connection.close()
    assert "Traceback" not in errors
    assert "ERROR" not in errors
    assert running.returncode in (0, 130)
    assert list((place / "cache" / "telescope" / "ui").glob("*.duckdb"))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["nowhere"], ["nowhere: "]),
        (["--host", "192.0.2.1"], ["192.0.2.1 port 8353"]),
        (["--rollouts", "3"], ["--rollouts", "--export PATH"]),
        (["--one-file"], ["--one-file", "--export PATH"]),
        (["--one-file", "--export", "runs"], ["runs is a folder"]),
        (["--one-file", "--export", "runs/quickstart/run.json"], ["run.json exists", "--force"]),
        (["--export", "page", "--port", "80"], ["--port", "--export"]),
        (["--export", "runs"], ["runs exists", "--export"]),
        (["other"], ["nothing in other is a run or an eval", "telescope train"]),
        (["--port", "0", "--allowed-host", "https://x.y"], ["'https://x.y'", "ui.example.org"]),
        (["--export", "page", "--allowed-host", "x"], ["--allowed-host", "--export"]),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(place, capsys, arguments, facts):
    before = sorted(place.glob("*")) + sorted((place / "runs").rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["ui", *arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert all(fact in said.err for fact in facts)
    left = set(place.glob("*")) | set((place / "runs").rglob("*"))
    assert left - set(before) <= {place / "cache", place / "state"}


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ui", "--help"])
    assert ended.value.code == 0
    assert "telescope ui runs/quickstart --export" in capsys.readouterr().out


def read_script(path: Path, before: str) -> object:
    """Return the JSON in a script that is one assignment."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith(before)
    assert text.endswith(";\n")
    return json.loads(text[len(before) : -2])


@pytest.mark.slow
def test_an_export_has_every_page_as_a_script(place):
    told = []
    done = export_runs(
        [Path("runs")], Path("page"), num_rollouts=12, tell=lambda *two: told.append(two)
    )
    assert (told[0], told[-1]) == ((0, done.num_pages), (done.num_pages, done.num_pages))
    found = read_script(Path("page/export.js"), "window.TELESCOPE_EXPORT = ")
    assert len(found["pages"]) == done.num_pages
    assert found["is_complete"]
    run = "/runs/quickstart"
    for address in ("/", run, f"{run}/timeline", f"{run}/logs", f"{run}/evals/math-after"):
        assert address in found["pages"]
    # Each metric can be looked at, as in the pages of a server.
    overview = read_page(found, run)
    assert {"entropy", "task_reward/mean"} <= overview["curves"]["metrics"].keys()
    assert sorted(overview["curves"]["metrics"]) == sorted(
        {name for section in overview["sections"] for name in section["metrics"]}
    )
    rollouts = read_page(found, f"{run}/rollouts")
    assert len(rollouts["columns"]["address"]) == 12
    assert set(rollouts["columns"]["step"]) == {1, 2, 3}
    for address in rollouts["columns"]["address"]:
        rollout = read_page(found, address)
        assert MARKUP in rollout["messages"][1]["content"]
        assert read_page(found, rollout["addresses"]["group"])["page"] == "group"
        assert read_page(found, rollout["addresses"]["example"])["page"] == "example"
    page = Path("page/index.html").read_text()
    assert "<base" not in page
    assert re.search(r'<script src="export.js"></script>\s*<script defer src="static/app.js"', page)
    assert Path("page/static/app.js").is_file()
    # What a rollout says can end no script.
    for script in Path("page/data").iterdir():
        assert "<" not in script.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupted_export_opens_and_is_written_anew(place, after):
    def interrupt(done, total):
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_runs([Path("runs")], Path("page"), num_rollouts=12, tell=interrupt)
    found = read_script(Path("page/export.js"), "window.TELESCOPE_EXPORT = ")
    assert not found["is_complete"]
    if after:
        assert read_page(found, "/")["page"] == "runs"
    assert Path("page/index.html").is_file()
    Path("page/notes.txt").write_text("mine")
    export_runs([Path("runs")], Path("page"), num_rollouts=12)
    with pytest.raises(ConfigError, match="--force"):
        export_runs([Path("runs")], Path("page"), num_rollouts=12)
    done = export_runs([Path("runs")], Path("page"), num_rollouts=6, replaces=True)
    found = read_script(Path("page/export.js"), "window.TELESCOPE_EXPORT = ")
    assert len(list(Path("page/data").iterdir())) == done.num_pages == len(found["pages"])
    assert Path("page/notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_runs([Path("runs")], Path("runs"), num_rollouts=6, replaces=True)


@pytest.mark.slow
def test_one_file_has_the_pages_that_a_folder_has_and_loads_nothing(place):
    export_runs([Path("runs")], Path("page"), num_rollouts=12)
    folder = read_script(Path("page/export.js"), "window.TELESCOPE_EXPORT = ")
    done = export_one_file([Path("runs")], Path("page.html"), num_rollouts=12)
    text = done.page.read_text(encoding="utf-8")
    script = re.search(r"<script>window.TELESCOPE_EXPORT = (.*);</script>", text)
    found = json.loads(script[1])
    data = json.loads(gzip.decompress(base64.b64decode(found["packed"])))
    assert data.keys() == folder["pages"].keys()
    assert found["first"] == "/runs/quickstart"
    rollouts = data["/runs/quickstart/rollouts"]
    assert (len(rollouts["columns"]["address"]), rollouts["total"]) == (12, 36)
    assert data["/runs/quickstart"]["verdict"] == read_page(folder, "/runs/quickstart")["verdict"]
    # Nothing that a model wrote is markup, and nothing is loaded from anywhere.
    assert "<img src=x" not in text
    assert not re.search(r"""(src|href)=["']?(?!data:|x\b)[\w/]""", text.partition("<script>")[0])
    # Without scripts, the report of core is shown.
    plain = text.partition("<noscript>")[2].partition("</noscript>")[0]
    assert data["/runs/quickstart"]["verdict"]["text"] in unescape(plain)
    with pytest.raises(ConfigError, match="--force"):
        export_one_file([Path("runs")], Path("page.html"), num_rollouts=12)
    export_one_file([Path("runs")], Path("page.html"), num_rollouts=0, replaces=True)
    assert len(done.page.read_text()) < len(text)
    write_run(place / "runs" / "second", steps=1)
    with pytest.raises(ConfigError, match="2 runs and 0 evals"):
        export_one_file([Path("runs")], Path("two.html"), num_rollouts=0)


@pytest.mark.slow
def test_the_report_of_a_run_has_its_pages_where_they_can_be_written(place, monkeypatch, capsys):
    report = Path("runs/quickstart/report.html")

    def told() -> str:
        with suppress(SystemExit):
            main(["eval", "--report", "runs/quickstart"])
        said = capsys.readouterr()
        assert "Report: runs/quickstart/report.html" in said.out
        return said.err

    assert "not written" not in told()
    assert "TELESCOPE_EXPORT" in report.read_text()
    with monkeypatch.context() as without:
        without.setattr("telescope_cli.run_report.find_spec", lambda name: None)
        assert "not written" not in told()
    plain = report.read_text()
    Path("file").write_text("")
    for home in ("file/home", None):  # a home that cannot be made, and none
        with monkeypatch.context() as in_container:
            in_container.delenv("XDG_CACHE_HOME")
            in_container.setattr(Path, "home", lambda home=home: Path(home) if home else _no_home())
            in_container.setenv("TMPDIR", str(place))
            in_container.setattr(tempfile, "tempdir", None)
            assert "not written" not in told()
        assert "TELESCOPE_EXPORT" in report.read_text()
        assert not list(place.glob("telescope-ui-*")), "its index is gone"
        report.write_text(plain)
    assert "Sample rollouts" in plain
    assert "TELESCOPE_EXPORT" not in plain
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    assert "XDG_CACHE_HOME" in told()
    assert "Sample rollouts" in report.read_text()


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def read_page(found, address):
    path = Path("page") / found["pages"][address]
    return read_script(path, f"window.TELESCOPE_EXPORT.loaded[{json.dumps(address)}] = ")


@contextmanager
def running_ui(*arguments: str) -> Generator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start `telescope ui --json` and end it; yield the process and what it says."""
    command = [sys.executable, "-c", CODE, "ui", "--json", *arguments]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running, json.loads(running.stdout.readline())
        finally:
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=LIMIT_S)


def asked(said: dict[str, Any], address: str) -> Any:
    port = int(said["address"].rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    headers = {"authorization": f"Bearer {said['token']}", "accept": "application/json"}
    connection.request("GET", address, headers=headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.mark.slow
def test_a_second_one_joins_the_first_and_the_address_stays_the_same(place, capsys, monkeypatch):
    write_run(place / "elsewhere" / "late")
    monkeypatch.setattr("telescope_ui.web.serve._has_screen", lambda: False)
    with running_ui() as (first, said):
        assert (said["pid"], said["joined"]) == (first.pid, False)
        with pytest.raises(SystemExit) as ended:
            main(["ui", "elsewhere"])
        assert ended.value.code == 0
        told = capsys.readouterr().out
        assert f"{said['address']}/?token={said['token']}" in told
        assert f"process {first.pid}" in told
        with pytest.raises(SystemExit):
            main(["ui", "elsewhere", "--json"])
        assert json.loads(capsys.readouterr().out) == {**said, "joined": True}
        page = asked(said, "/")
        assert {run["key"] for run in page["runs"]} == {"quickstart", "late"}
        assert page["folders"] == ["runs", str(place / "elsewhere")]
        with pytest.raises(SystemExit) as ended:
            main(["ui", "other"])
        assert ended.value.code == 2
        # Options that the server does not have need another one.
        with running_ui("--allowed-host", "x.example") as (second, other):
            assert other["pid"] == second.pid
            assert other["address"] != said["address"]
    with running_ui("elsewhere") as (_, again):
        assert (again["address"], again["token"]) == (said["address"], said["token"])
        assert [run["key"] for run in asked(again, "/")["runs"]] == ["late"]
    for path in (place / "state" / "telescope" / "ui").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
