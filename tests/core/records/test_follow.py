"""Lines that somebody else appends: each is told once and whole; a new file is noticed."""

import json
from pathlib import Path

from telescope_core.records.files import append_json_line, write_text
from telescope_core.records.follow import FollowedLines


def test_each_line_is_told_once_and_only_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = FollowedLines(path)
    assert lines.read() == ([], False)
    append_json_line(path, {"step": 1})
    assert lines.read() == ([{"step": 1}], False)
    assert lines.read() == ([], False)
    with path.open("a") as stream:
        stream.write('{"step": 2')
        stream.flush()
        assert lines.read() == ([], False)
        stream.write('}\n{"step": 3}\nno object\n[4]\n')
    assert lines.read() == ([{"step": 2}, {"step": 3}], False)


def test_a_file_that_is_written_anew_is_told_from_its_beginning(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = FollowedLines(path)
    for step in (1, 2, 3):
        append_json_line(path, {"step": step})
    lines.read()
    # Longer than before, so that only its identity tells it.
    rows = [{"step": 1}, {"step": 2, "note": "x" * 1000}]
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    assert lines.read() == (rows, True)
    path.write_text('{"step": 1}\n')
    assert lines.read() == ([{"step": 1}], True)
    path.unlink()
    assert lines.read() == ([], True)
    assert lines.read() == ([], False)


def test_a_line_of_many_megabytes_is_one_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = FollowedLines(path)
    long = {"text": "x" * (8 * 2**20)}
    append_json_line(path, {"step": 1})
    append_json_line(path, long)
    append_json_line(path, {"step": 2})
    assert lines.read().rows == [{"step": 1}, long, {"step": 2}]
