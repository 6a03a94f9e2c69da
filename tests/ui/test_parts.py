"""The parts that need no server: thinning, lanes, densities, lines of logs, texts of tokens."""

import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.records import RunFolder
from telescope_core.records.follow import LineTail
from telescope_ui.base.curves import Drawn, shared_curves, thinned
from telescope_ui.base.lanes import (
    Bar,
    Change,
    depths_of,
    lanes_of,
    mean_numbers,
    seconds_by_name,
)
from telescope_ui.files.database import Database
from telescope_ui.files.json_lines import JsonLines, NewRows
from telescope_ui.files.logs import FileFacts, parsed
from telescope_ui.files.token_texts import texts_for
from telescope_ui.index.runs import Runs

NUMBERS = st.floats(-1e6, 1e6) | st.just(math.nan)


@given(values=st.lists(NUMBERS, max_size=300), points=st.integers(10, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values, points):
    column = array("d", values)
    kept = thinned([column], len(column), points=points)
    assert len(kept.positions) <= points or not kept.is_thinned
    assert kept.positions == sorted(set(kept.positions))
    known = [value for value in column if not math.isnan(value)]
    shown = [column[at] for at in kept.positions if not math.isnan(column[at])]
    if known:
        assert (min(shown), max(shown)) == (min(known), max(known))
    if values:
        assert (kept.positions[0], kept.positions[-1]) == (0, len(values) - 1)


@given(
    values=st.lists(NUMBERS, max_size=200),
    window=st.integers(2, 9),
    first=st.none() | st.integers(1, 50),
)
def test_averages_of_the_positions_that_are_drawn_are_those_of_the_whole_curve(
    values, window, first
):
    drawn = Drawn(points=20, first=first, smooth=window)
    found = shared_curves(range(1, len(values) + 1), {"m": array("d", values)}, drawn)
    assert found["metrics"]["m"] == pytest.approx(
        [values[step - 1] for step in found["steps"]], nan_ok=True
    )
    for step, mean in zip(found["steps"], found["smooth"]["m"], strict=True):
        before = [v for v in values[max(0, step - window) : step] if not math.isnan(v)]
        is_gap = math.isnan(values[step - 1])
        assert math.isnan(mean) if is_gap else mean == math.fsum(before) / len(before)


BARS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda b: Bar(b[0], b[0] + b[1])),
    max_size=40,
).map(sorted)


@given(bars=BARS)
def test_no_two_bars_of_a_lane_overlap_and_lanes_are_as_few_as_can_be(bars):
    lanes = lanes_of(bars)
    for at, one in enumerate(bars):
        for before in range(at):
            if lanes[before] == lanes[at]:
                assert bars[before].end_s <= one.start_s
    most = max((sum(o.start_s <= b.start_s < o.end_s for o in bars) for b in bars), default=0)
    empty = sum(bar.start_s == bar.end_s for bar in bars)
    assert max(lanes, default=-1) + 1 <= most + empty


@given(bars=BARS, data=st.data())
def test_each_second_counts_once_and_for_the_bar_that_began_last(bars, data):
    named = [(data.draw(st.sampled_from("abc")), bar) for bar in bars]
    found = seconds_by_name(named)
    expected = dict.fromkeys("abc", 0)
    for second in range(80):
        there = [one for one in named if one[1].start_s <= second < one[1].end_s]
        if there:
            latest = max(one[1].start_s for one in there)
            soonest = min(one[1].end_s for one in there if one[1].start_s == latest)
            names = {n for n, bar in there if bar == Bar(latest, soonest)}
            # Two bars that are the same in time count for either.
            expected["".join(sorted(names))] = expected.get("".join(sorted(names)), 0) + 1
    assert sum(found.values()) == sum(expected.values())
    for name, seconds in expected.items():
        if len(name) == 1 and not any(name in other for other in expected if len(other) > 1):
            assert found.get(name, 0.0) == seconds


def test_depths_follow_nesting():
    bars = [Bar(0, 10), Bar(0, 4), Bar(1, 2), Bar(5, 9), Bar(10, 12)]
    assert depths_of(bars) == [0, 1, 2, 1, 0]


def test_bars_that_follow_each_other_are_not_nested_by_rounding():
    assert depths_of([Bar(0.0, 1.0), Bar(0.9999, 2.0), Bar(1.5, 2.0002), Bar(2.0, 3.0)]) == [
        *(0, 0, 1, 0)
    ]
    assert depths_of([Bar(0.0, 2.0), Bar(1.0, 1.0), Bar(2.0, 2.0)]) == [0, 1, 0]


@given(bars=BARS, num_buckets=st.integers(1, 30))
def test_a_density_is_the_mean_number_of_bars_at_once(bars, num_buckets):
    width = 71 / num_buckets
    changes = []
    for bar in bars:
        changes.append(Change(int(bar.start_s // width), 1, bar.start_s))
        changes.append(Change(int(bar.end_s // width), -1, -bar.end_s))
    found = mean_numbers(changes, num_buckets=num_buckets, bucket_s=width)
    for bucket in range(num_buckets):
        low, high = bucket * width, (bucket + 1) * width
        total = sum(max(0.0, min(bar.end_s, high) - max(bar.start_s, low)) for bar in bars)
        assert found.get(bucket, 0.0) == pytest.approx(total / width, abs=1e-5)


@given(parts=st.lists(st.binary(max_size=30), max_size=12))
def test_a_tail_gives_each_whole_line_once(parts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tail") / "file"
    tail, found = LineTail(path), []
    for part in parts:
        with path.open("ab") as stream:
            stream.write(part)
        assert not tail.is_rewritten()
        found += tail.lines()
    assert found == b"".join(parts).split(b"\n")[:-1]


def test_a_damaged_line_costs_none_of_those_around_it(tmp_path):
    lines = [b'{"at": %d}' % at for at in range(20_000)]
    lines[7], lines[15_000], lines[-1] = b'{"at": 7, ', b"", b"\xff"
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines) + b'\n{"at": 20')
    rows = NewRows(tmp_path, "rows.jsonl", dict[str, int])
    assert not rows.is_rewritten()
    assert [row["at"] for row in rows] == [at for at in range(19_999) if at not in (7, 15_000)]


@pytest.mark.parametrize("content", [b"other\nlines\n", b"a\n", b"", b"x\ny\n"])
def test_a_file_that_was_rewritten_is_read_again(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\n")
    tail = LineTail(path)
    assert list(tail.lines()) == [b"a", b"b"]
    path.write_bytes(content)
    assert tail.is_rewritten()
    assert list(tail.lines()) == content.split(b"\n")[:-1]


def test_a_line_without_an_end_fills_no_memory(tmp_path):
    path = tmp_path / "file"
    # Longer than what is read at once, so that no part of it may be kept.
    path.write_bytes(b"first\n" + b"x" * (3 * 2**20) + b"\nlast\n")
    tail = LineTail(path, max_line_bytes=2**16)
    assert list(tail.lines()) == [b"first", b"last"]
    assert tail.num_skipped == 1
    assert [one.partition(" ")[0] for one in tail.problems] == ["file"]
    with path.open("ab") as stream:
        stream.write(b"x" * 2**20)
    torn = LineTail(path, max_line_bytes=2**21)
    assert list(torn.lines()) == [b"first", b"last"]
    assert (tail.is_rewritten(), list(tail.lines()), tail.num_skipped) == (False, [], 1)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one line\n" * 2**19)
    tail = LineTail(path, max_file_bytes=2**20)
    assert 2**20 <= 9 * len(list(tail.lines())) < 2 * 2**20 + 9
    assert tail.is_cut
    assert list(tail.lines()) == []
    whole = LineTail(path, max_file_bytes=9 * 2**19)
    assert len(list(whole.lines())) == 2**19
    assert [one.partition(" ")[0] for one in whole.problems] == ["file"]


def test_rows_grow_with_their_file_and_what_is_no_object_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = JsonLines(tmp_path, "a.jsonl")
    assert rows.rows() == []
    path.write_text('{"a": 1}\n[2]\nnot json\n{"b":')
    assert rows.rows() == [{"a": 1}]
    with path.open("a") as stream:
        stream.write(" 2}\n" + json.dumps({"long": "x" * (3 * 2**20)}) + '\n{"c": 3}\n')
    assert [one.partition(" ")[0] for one in rows.problems()] == ["a.jsonl"] * 2
    assert rows.rows() == [{"a": 1}, {"b": 2}, {"c": 3}]
    path.write_text('{"d": 4}\n')
    assert rows.rows() == [{"d": 4}]


FACTS = FileFacts(component="server", mtime_s=9e8, year=2026, utc_offset_s=0)


@pytest.mark.parametrize(
    ("line", "time_s", "level"),
    [
        (b"INFO 11-23 15:18:34 [api.py:1] ready", 1795447114.0, "info"),
        (b"2026-11-23T15:18:34.5+01:00 ERROR lost", 1795443514.5, "error"),
        (b"2026-11-23 15:18:34,250 - WARNING - slow", 1795447114.25, "warning"),
        (b"(EngineCore pid=7) DEBUG 11-23 15:18:34 x", 1795447114.0, "debug"),
        (b"[2026/11/23 15:18:34Z] hello", 1795447114.0, "info"),
        (b"nothing known 99-99 99:99:99", 9e8, "info"),
        (b"\xff\xfe\x00", 9e8, "info"),
    ],
)
def test_times_and_levels_are_found_as_programs_write_them(line, time_s, level):
    (found,) = parsed([line], 0, FACTS, is_json=False)
    assert (found.time_s, found.level) == (time_s, level)


def test_lines_without_a_time_follow_the_line_before():
    lines = [b"before", b"2026-11-23 15:18:34 ERROR a", b"  Traceback", b"2026-11-23 15:18:35 b"]
    found = parsed(lines, 100, FACTS, is_json=False)
    assert [line.time_s - 1795447114.0 for line in found] == [0, 0, 0, 1]
    assert [line.level for line in found] == ["info", "error", "error", "info"]
    assert [(line.start, line.end) for line in found][:2] == [(100, 107), (107, 135)]


def test_texts_of_tokens_come_from_the_vocabulary_of_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "final" / "model"
    folder.mkdir(parents=True)
    # In byte-level vocabularies, the character U+0120 stands for a space, and these two for the
    # bytes of an e with an accent.
    vocabulary = {"a": 0, "\u0120b": 1, "\u00c3": 2, "\u00a9": 3}
    content = {
        "model": {"vocab": vocabulary},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 4, "content": "<|end|>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = texts_for(tmp_path)
    assert texts.pieces([0, 1, 2, 3, 4, 5]) == ["a", " b", "", "\u00e9", "<|end|>", "<5>"]
    (folder / "tokenizer.json").write_text("{}")
    assert texts_for(tmp_path) is None


@pytest.fixture
def database(tmp_path):
    made = Database(tmp_path / "cache")
    yield made
    made.close()


def test_runs_are_found_in_folders_below_and_links_out_are_named(tmp_path, database):
    opened, elsewhere = tmp_path / "runs", tmp_path / "private"
    for name in ("a", "sweep/seed0", "sweep/more/seed1", "one/two/three/too-deep"):
        RunFolder.create(opened / name, config={})
    # What a run holds is its own, and a loop of links ends.
    RunFolder.create(opened / "a" / "inner", config={})
    (opened / "sweep" / "loop").symlink_to(opened)
    (opened / "sweep" / "again").symlink_to(opened / "a")
    RunFolder.create(elsewhere / "other", config={})
    (opened / "sweep" / "out").symlink_to(elsewhere)
    runs = Runs([opened], database)
    assert sorted(run.key for run in runs.all()) == ["a", "seed0", "seed1"]
    assert [link.name for link in runs.left_out] == ["out"]
    runs.close()
