"""Lines that somebody else appends: each is told once and whole; a new file is noticed."""

import json
from pathlib import Path
from typing import Any

from telescope_core.records.files import append_json_line, write_text
from telescope_core.records.follow import LineTail


def new(tail: LineTail) -> tuple[list[dict[str, Any]], bool]:
    is_rewritten = tail.is_rewritten()
    return list(tail.rows()), is_rewritten


def test_each_line_is_told_once_and_only_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert new(tail) == ([], False)
    append_json_line(path, {"step": 1})
    assert new(tail) == ([{"step": 1}], False)
    assert new(tail) == ([], False)
    with path.open("a") as stream:
        stream.write('{"step": 2')
        stream.flush()
        assert new(tail) == ([], False)
        stream.write('}\n{"step": 3}\nno object\n[4]\n')
    assert new(tail) == ([{"step": 2}, {"step": 3}], False)


def test_a_file_that_is_written_anew_is_told_from_its_beginning(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    for step in (1, 2, 3):
        append_json_line(path, {"step": step})
    new(tail)
    # Longer than before, so that only its identity tells it.
    rows = [{"step": 1}, {"step": 2, "note": "x" * 1000}]
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    assert new(tail) == (rows, True)
    path.write_text('{"step": 1}\n')
    assert new(tail) == ([{"step": 1}], True)
    path.unlink()
    assert new(tail) == ([], True)
    assert new(tail) == ([], False)


def test_a_line_of_many_megabytes_is_one_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    long = {"text": "x" * (8 * 2**20)}
    append_json_line(path, {"step": 1})
    append_json_line(path, long)
    append_json_line(path, {"step": 2})
    assert new(tail)[0] == [{"step": 1}, long, {"step": 2}]


def test_a_file_that_is_replaced_just_before_it_is_read_is_told_the_next_time(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_text(path, '{"step": 1}\n{"step": 2}\n')
    tail = LineTail(path)
    new(tail)
    assert not tail.is_rewritten()
    write_text(path, '{"step": 1}\n{"step": 3, "note": "other"}\n')
    assert list(tail.rows()) == []
    assert new(tail) == ([{"step": 1}, {"step": 3, "note": "other"}], True)
