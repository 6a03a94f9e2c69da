"""The page of logs: files that were full are read as one log, in order, also while it goes on."""

import json
import logging
from pathlib import Path

import pytest
from tests.ui.served import answered

from telescope_core.records import RunFolder
from telescope_core.records.logs import JsonLines, Logs
from telescope_ui.files.logs import logs_of
from telescope_ui.files.run_files import listed

BEGAN_S = 1_760_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "r", config={})


class Writer:
    """A process of a run: its log is full after a few lines."""

    def __init__(self, run: RunFolder, component: str, source: str = "") -> None:
        name = f"{component}-{source}.jsonl" if source else f"{component}.jsonl"
        self.handler = JsonLines(
            run.logs_path / name, component=component, source=source, max_bytes=1500
        )
        self.num = 0

    def write(self, count: int, *, level: int = logging.INFO) -> list[str]:
        """Write `count` lines, all of the same moment; returns their messages."""
        texts = [f"{self.handler.baseFilename[-9:]} {self.num + at}" for at in range(count)]
        for text in texts:
            record = logging.LogRecord("x", level, "x.py", 1, text, None, None)
            record.created = BEGAN_S
            self.handler.handle(record)
        self.num += count
        return texts


def messages(page: dict) -> list[str]:
    return page["lines"]["columns"]["message"]


def test_full_files_are_read_in_order_in_both_directions(tmp_path, run):
    texts = Writer(run, "driver").write(50)
    assert len(list(run.logs_path.iterdir())) == 4
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/logs")
        assert messages(page) == texts
        assert [one["file"] for one in page["components"]] == ["driver.jsonl"]
        seen, cursor = [], ""
        while cursor is not None:
            page = ui.get(f"/runs/r/logs?limit=4&cursor={cursor}")
            seen = messages(page) + seen
            cursor = page["older"]
    assert seen == texts


def test_a_tail_goes_on_over_full_files(tmp_path, run):
    driver = Writer(run, "driver")
    before = driver.write(12)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/logs")
        assert messages(page) == before
        first = cursor = page["newer"]
        for count in (1, 0, 9, 3, 12):
            after = driver.write(count)
            page = ui.get(f"/runs/r/logs?direction=newer&cursor={cursor}")
            assert messages(page) == after
            cursor = page["newer"]
        # What is older than a page stays so, whatever came since and is called what it was.
        page = ui.get(f"/runs/r/logs?cursor={first}")
        assert messages(page) == before[-len(messages(page)) :]


def test_lines_are_chosen_by_component_source_level_and_life(tmp_path, run):
    for life in (1, 2, 3):
        for rank in (0, 1):
            with Logs(folder=run.logs_path).begin("trainer", f"rank {rank}"):
                logging.getLogger("telescope_train").warning("life %d of %d", life, rank)
        with Logs(folder=run.logs_path).begin("driver"):
            pass
    (run.logs_path / "inference-0.log").write_text("INFO 10-09 08:53:20 [a.py:1] ready\n")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/logs")
        assert page["lives"] == [1, 2, 3]
        assert page["lines"]["columns"]["life"].count(None) == 1
        names = [(one["name"], one["file"]) for one in page["components"]]
        assert names == [
            ("driver", "driver.jsonl"),
            ("inference-0", "inference-0.log"),
            ("trainer", "trainer-rank-0.jsonl"),
            ("trainer", "trainer-rank-1.jsonl"),
        ]
        asked = "component=trainer&source=rank%201&level=warning&life=1&life=3"
        page = ui.get(f"/runs/r/logs?{asked}")
        assert messages(page) == ["life 1 of 1", "life 3 of 1"]
        assert page["older"] is None
        # What can be chosen does not depend on what is.
        assert (page["lives"], page["sources"]) == ([1, 2, 3], ["rank 0", "rank 1"])
        assert messages(ui.get("/runs/r/logs?source=rank%207")) == []
        columns = ui.get("/runs/r/logs?component=driver&life=2")["lines"]["columns"]
        assert (columns["component"], columns["life"]) == (["driver"], [2])
        error = ui.get("/runs/r/logs?life=first", status=400)["error"]["message"]
        assert "life" in error


@pytest.mark.slow
def test_the_end_of_many_large_logs_is_there_at_once(tmp_path, run):
    for rank in range(64):
        lines = [
            json.dumps(
                {
                    **{"time_s": BEGAN_S + at, "level": "info", "component": "trainer"},
                    **{"source": f"rank {rank}", "life": 1, "message": f"{at} {'x' * 2000}"},
                }
            ).encode()
            for at in range(50)
        ]
        for name in (f"trainer-rank-{rank}.1.jsonl", f"trainer-rank-{rank}.jsonl"):
            with (run.logs_path / name).open("wb") as stream:
                stream.write(lines[0] + b"\n")
                # Sparse: 64 MiB that take no room.
                stream.seek(64 * 2**20)
                stream.write(b"\n" + b"\n".join(lines) + b"\n")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        before = _bytes_read()
        page = ui.get("/runs/r/logs?limit=500")
        assert not page["is_cut"]
        ends = [message.split()[0] for message in messages(page)]
        assert ends == sorted(ends)
        assert ends[-64:] == ["49"] * 64
        page = ui.get("/runs/r/logs?limit=20&source=rank%2063")
        assert not page["is_cut"]
        assert page["lines"]["columns"]["source"] == ["rank 63"] * 20
        assert _bytes_read() - before < 256 * 2**20, "of 8 GiB"


def _bytes_read() -> int:
    """Return what this process has asked of files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def test_lines_of_other_programs_are_shown_as_far_as_they_can_be(tmp_path, run):
    lines = [
        {"component": ["a"], "source": 3, "life": True, "time_s": BEGAN_S, "message": "first"},
        {"component": "other", "source": None, "life": "two", "time_s": BEGAN_S, "message": None},
        {"level": "FATAL", "life": 2**40, "time_s": BEGAN_S, "message": {"a": 1}},
        [1],
        {"time_s": "yesterday", "message": "no time"},
    ]
    (run.logs_path / "own.2.jsonl").write_text("not json\n")
    (run.logs_path / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/logs")
        columns = page["lines"]["columns"]
        assert sorted(columns["message"]) == sorted(
            ["not json", "first", "None", "{'a': 1}", json.dumps(lines[3]), json.dumps(lines[4])]
        )
        assert page["lives"] == [2**40]
        assert set(columns["level"]) == {"info", "error"}
        assert messages(ui.get("/runs/r/logs?component=other&source=")) == ["None"]


def test_a_file_that_is_renamed_meanwhile_is_not_read_as_another(run):
    driver = Writer(run, "driver")
    driver.write(10)
    before = listed(run.path.resolve(), "logs", suffixes=(".jsonl",))
    (log,) = logs_of(before)
    driver.write(10)
    assert [path.name for path in sorted(run.logs_path.iterdir())] == [
        "driver.1.jsonl",
        "driver.jsonl",
    ]
    assert logs_of(before) == []
    (file,) = log.files
    assert list(file.forwards(0, file.size)) == list(file.backwards(file.size)) == []
    assert file.key in {
        one.key for one in logs_of(listed(run.path, "logs", suffixes=("l",)))[0].files
    }


def test_debug_messages_are_shown_where_they_are_asked_for(tmp_path, run):
    driver = Writer(run, "driver")
    texts = driver.write(1, level=logging.DEBUG) + driver.write(1)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert messages(ui.get("/runs/r/logs?level=debug")) == texts
        assert messages(ui.get("/runs/r/logs?level=info")) == texts[1:]


def test_a_search_that_is_cut_says_how_far_it_got_and_goes_on_from_there(
    tmp_path, run, monkeypatch
):
    monkeypatch.setattr("telescope_ui.pages.logs.LIMIT_S", -1.0)
    lines = [
        {"time_s": BEGAN_S + at, "component": "driver", "message": f"line {at}"} for at in range(20)
    ]
    (run.logs_path / "driver.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    reached, cursor, found = [], "", []
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        while cursor is not None:
            page = ui.get(f"/runs/r/logs?q=line%203&cursor={cursor}")
            found += messages(page)
            reached.append(page["reached_s"])
            cursor = page["older"]
    assert found == ["line 3"]
    assert reached == [BEGAN_S + at for at in reversed(range(20))]


def test_new_lines_come_to_their_end_however_slow_a_disk_is(tmp_path, run, monkeypatch):
    monkeypatch.setattr("telescope_ui.pages.logs.LIMIT_S", -1.0)
    driver = Writer(run, "driver")
    driver.write(1)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        cursor = ui.get("/runs/r/logs")["newer"]
        texts, found, is_cut = driver.write(5), [], True
        while is_cut:
            page = ui.get(f"/runs/r/logs?direction=newer&cursor={cursor}")
            assert page["newer"] != cursor
            found, cursor, is_cut = found + messages(page), page["newer"], page["is_cut"]
    assert found == texts


def test_new_lines_that_are_too_many_for_an_answer_are_said_to_be(tmp_path, run):
    driver = Writer(run, "driver")
    driver.write(1)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        cursor, found = ui.get("/runs/r/logs")["newer"], []
        texts, is_cut = driver.write(7), True
        while is_cut:
            page = ui.get(f"/runs/r/logs?direction=newer&limit=3&cursor={cursor}")
            found.append(messages(page))
            cursor, is_cut = page["newer"], page["is_cut"]
    assert found == [texts[:3], texts[3:6], texts[6:]]
