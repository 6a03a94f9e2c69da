"""Block logs: nothing is lost by a kill, a full disk or a second writer."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_core.records.blocks import BlockLog, block_files, read_blocks
from telescope_core.records.timeline import GaugeSample, ModelCall, TimelineSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    time_s: float
    name: str
    step: int | None = None
    note: str = ""


def _rows(count: int, begin: int = 0) -> list[Row]:
    return [
        Row(time_s=number / 3, name=f"row {number % 7}", step=number if number % 2 else None)
        for number in range(begin, begin + count)
    ]


def test_rows_come_back_in_order_over_blocks_and_open_lines(tmp_path: Path):
    rows = _rows(25)
    with BlockLog(tmp_path / "log", Row, block_rows=10) as log:
        for row in rows:
            log.add(row)
    assert [path.name for path in block_files(tmp_path / "log")] == [
        "000001.parquet",
        "000002.parquet",
        "000003.jsonl",
    ]
    assert list(read_blocks(tmp_path / "log", Row)) == rows


def test_rows_are_there_before_the_log_is_closed(tmp_path: Path):
    log = BlockLog(tmp_path, Row)
    log.extend(_rows(3))
    log.flush()
    assert list(read_blocks(tmp_path, Row)) == _rows(3)
    log.close()


def test_the_next_writer_goes_on_with_the_open_block(tmp_path: Path):
    for begin in (0, 4, 8):
        with BlockLog(tmp_path, Row, block_rows=10) as log:
            log.extend(_rows(4, begin))
    assert list(read_blocks(tmp_path, Row)) == _rows(12)
    assert [path.name for path in block_files(tmp_path)] == ["000001.parquet", "000002.jsonl"]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path):
    with BlockLog(tmp_path, Row) as log:
        log.extend(_rows(3))
    path = tmp_path / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert list(read_blocks(tmp_path, Row)) == _rows(2)
    with BlockLog(tmp_path, Row) as log:
        log.extend(_rows(1, 3))
    assert list(read_blocks(tmp_path, Row)) == [*_rows(2), *_rows(1, 3)]


def test_a_block_that_a_kill_left_in_two_forms_counts_once(tmp_path: Path):
    with BlockLog(tmp_path, Row) as log:
        log.extend(_rows(9))
    lines = (tmp_path / "000001.jsonl").read_bytes()
    with BlockLog(tmp_path, Row, block_rows=10) as log:
        log.extend(_rows(1, 9))
    (tmp_path / "000001.jsonl").write_bytes(lines)
    assert list(read_blocks(tmp_path, Row)) == _rows(10)
    with BlockLog(tmp_path, Row, block_rows=10) as log:
        log.extend(_rows(1, 10))
    assert list(read_blocks(tmp_path, Row)) == _rows(11)
    assert not (tmp_path / "000001.jsonl").exists()


def test_what_the_disk_does_not_take_is_kept_then_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "log"
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr("telescope_core.records.row_log._MOST_KEPT_ROWS", 5)
    log = BlockLog(folder, Row)
    log.extend(_rows(8))
    with pytest.raises(OSError, match="log"):
        log.flush()
    log.close()
    assert log.num_lost == 3
    folder.unlink()
    log.flush()
    assert list(read_blocks(folder, Row)) == _rows(8)[3:]


def test_rows_of_a_newer_version_are_read_without_what_is_new(tmp_path: Path):
    line = {"time_s": 1.5, "name": "forward", "color": "blue"}
    (tmp_path / "000001.jsonl").write_text(json.dumps(line) + "\n")
    assert list(read_blocks(tmp_path, Row)) == [Row(time_s=1.5, name="forward")]


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "000001.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"000001\.parquet"):
        list(read_blocks(tmp_path, Row))
    (tmp_path / "000001.parquet").unlink()
    (tmp_path / "000001.jsonl").write_text('{"time_s":1}\n')
    with pytest.raises(ConfigError, match=r"000001\.jsonl"):
        list(read_blocks(tmp_path, Row))


@pytest.mark.parametrize(
    "row",
    [
        TimelineSpan(time_s=1.0, duration_s=0.5, name="forward", source="rank 0", microbatch=2),
        ModelCall(time_s=1.0, duration_s=2.0, server="http://a", queue_s=0.25, version=3),
        GaugeSample(time_s=1.0, source="node a", name="cpu/share", value=0.5),
    ],
)
def test_the_rows_of_a_run_survive_packing(tmp_path: Path, row: object):
    with BlockLog(tmp_path, type(row), block_rows=1) as log:
        log.add(row)
    assert [path.suffix for path in block_files(tmp_path)] == [".parquet"]
    assert list(read_blocks(tmp_path, type(row))) == [row]


def test_a_block_that_cannot_be_packed_stays_as_lines_and_the_log_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    too_large = Row(time_s=1.0, name="x", step=2**70)
    rows = [*_rows(3), too_large, *_rows(5, 3)]
    with BlockLog(tmp_path, Row, block_rows=4) as log:
        for row in rows:
            log.add(row)
            log.flush()
    assert [path.name for path in block_files(tmp_path)] == [
        "000001.jsonl",
        "000002.parquet",
        "000003.jsonl",
    ]
    assert list(read_blocks(tmp_path, Row)) == rows
    assert log.num_lost == 0
    assert caplog.text.count("stays as lines of text") == 1
    # The next writer goes on with the open block, and not with the one that is full.
    with BlockLog(tmp_path, Row, block_rows=4) as log:
        log.extend(_rows(1, 8))
    assert list(read_blocks(tmp_path, Row)) == [*rows, *_rows(1, 8)]


def test_a_row_that_has_no_line_is_dropped_and_counted_and_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    strange = Row(time_s=1.0, name="x", note=object())  # type: ignore[arg-type]
    with BlockLog(tmp_path, Row) as log:
        log.extend([*_rows(2), strange, strange, *_rows(2, 2)])
    assert list(read_blocks(tmp_path, Row)) == _rows(4)
    assert log.num_lost == 2
    assert caplog.text.count("are dropped") == 1


@pytest.mark.parametrize("block_rows", [3, 2])
def test_what_is_no_number_is_null_in_a_file_and_comes_back(tmp_path: Path, block_rows: int):
    rows = [GaugeSample(time_s=1.0, source="a", name="b", value=one) for one in (math.nan, 0.5)]
    with BlockLog(tmp_path, GaugeSample, block_rows=block_rows) as log:
        log.extend(rows)
    first, second = read_blocks(tmp_path, GaugeSample)
    assert math.isnan(first.value)
    assert second == rows[1]
    assert all("NaN" not in path.read_text() for path in tmp_path.glob("*.jsonl"))


def test_half_a_surrogate_pair_is_kept_beside_other_rows(tmp_path: Path):
    rows = [Row(time_s=1.0, name="a", note="\ud800"), Row(time_s=2.0, name="\u00e9")]
    with BlockLog(tmp_path, Row) as log:
        log.extend(rows)
    assert list(read_blocks(tmp_path, Row)) == rows


def test_what_is_no_block_is_left_alone(tmp_path: Path):
    with BlockLog(tmp_path, Row) as log:
        log.extend(_rows(1))
    (tmp_path / "notes.jsonl").write_text("{}\n")
    (tmp_path / ".000002.parquet.tmp").write_text("x")
    assert list(read_blocks(tmp_path, Row)) == _rows(1)
