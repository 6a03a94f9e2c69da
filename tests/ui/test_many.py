"""Runs with more of something than a page can draw, and files of earlier versions."""

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.ui.recorded import BEGAN_S, STEP_S, row, write_eval, write_steps
from tests.ui.served import answered

from telescope_core.base.errors import ConfigError
from telescope_core.records import RunFolder, step_files
from telescope_core.records.blocks import BlockLog
from telescope_core.records.events import EventLog
from telescope_core.records.parquet import read_chosen, read_row, write_rows
from telescope_core.records.timeline import GaugeSample, ModelCall, TimelineSpan
from telescope_ui.index import building, search
from telescope_ui.index.building import rows_of

SERVER = "http://127.0.0.1:1"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "r", config={})


def bars_of(number):
    """Return (start, duration) of calls that overlap each other, in seconds from the beginning."""
    return [(0.01 * at, 0.5 + 0.001 * (at % 700)) for at in range(number)]


@pytest.mark.slow
def test_more_bars_than_can_be_drawn_become_their_mean_number_at_once(tmp_path, run):
    bars = bars_of(3000)
    with BlockLog(run.path / "calls", ModelCall, block_rows=1000) as log:
        for at, (start_s, length_s) in enumerate(bars):
            log.add(
                ModelCall(
                    **{"time_s": BEGAN_S + start_s, "duration_s": length_s, "server": SERVER},
                    **{"group_id": "1.0", "index": at, "step": 1},
                )
            )
    first_s, last_s = 5.0, 25.0
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get(f"/runs/r/timeline?from={BEGAN_S + first_s}&to={BEGAN_S + last_s}&width=400")
    (shown,) = page["rows"]
    assert shown["bars"]["columns"]["name"] == []
    assert page["bucket_s"] == pytest.approx((last_s - first_s) / 100)
    found = dict(zip(shown["density"]["bucket"], shown["density"]["busy"], strict=True))
    assert set(shown["density"]["name"]) == {"call"}
    for bucket in range(100):
        low = first_s + bucket * page["bucket_s"]
        high = low + page["bucket_s"]
        total_s = sum(max(0.0, min(a + b, high) - max(a, low)) for a, b in bars)
        assert found.get(bucket, 0.0) == pytest.approx(total_s / page["bucket_s"], abs=0.01)


def test_nested_spans_of_a_rank_keep_their_depth_in_any_window(tmp_path, run):
    with BlockLog(run.path / "timeline", TimelineSpan) as log:
        for name, start_s, length_s in (("a", 0, 10), ("b", 1, 8), ("c", 2, 1), ("d", 20, 0)):
            about = {"name": name, "source": "rank 1", "step": 1}
            log.add(TimelineSpan(time_s=BEGAN_S + start_s, duration_s=float(length_s), **about))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get(f"/runs/r/timeline?from={BEGAN_S + 2.5}&to={BEGAN_S + 21}")
    (shown,) = page["rows"]
    columns = shown["bars"]["columns"]
    assert list(zip(columns["name"], columns["lane"], strict=True)) == [
        *(("a", 0), ("b", 1), ("c", 2), ("d", 0))
    ]


def test_where_the_time_of_a_window_went_adds_up_to_it(tmp_path, run):
    spans = [("wait for rollouts", 0, 4), ("train", 4, 3), ("after the step", 7, 2)]
    with BlockLog(run.path / "timeline", TimelineSpan) as log:
        for name, start_s, length_s in [*spans, ("copy for checkpoint", 7.5, 1)]:
            about = {"name": name, "source": "driver", "step": 1}
            log.add(TimelineSpan(time_s=BEGAN_S + start_s, duration_s=float(length_s), **about))
        log.add(TimelineSpan(time_s=BEGAN_S, duration_s=9.0, name="forward", source="rank 0"))
    write_eval(run, "after", version=1, solved=1)  # from 8 to 10 s
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        time = ui.get(f"/runs/r/timeline?from={BEGAN_S + 1}&to={BEGAN_S + 12}")["time"]
        empty = ui.get(f"/runs/r/timeline?from={BEGAN_S + 50}&to={BEGAN_S + 60}")["time"]
    assert {one["name"]: one["seconds"] for one in time} == pytest.approx(
        {
            **{"wait for rollouts": 3, "train": 3, "after the step": 1, "copy for checkpoint": 1},
            **{"evals": 1, "": 2},
        }
    )
    assert {one["name"]: one["seconds"] for one in empty} == {"evals": 0, "": 10}


def write_stages(run, steps):
    """Write the stages of one rollout of each step, and when the step has ended."""
    stages = (("waiting", 0.0), ("environment", 1.5), ("generating", 2.5), ("scoring", 6.0))
    for step in steps:
        about = {
            "step": step,
            "environment": "math",
            "group_id": f"{step}.0",
            "index": 0,
            "call": 0,
        }
        at_s = BEGAN_S + STEP_S * (step - 1)
        events = [
            {**about, "attempt": 1, "time_s": at_s + second, "stage": stage, "server": SERVER}
            for stage, second in (*stages, ("done", 9.0))
        ]
        path = run.path / "events" / f"step-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        run.log_metrics({"step": step, "time_s": at_s + STEP_S})


@pytest.mark.slow
@pytest.mark.parametrize("has_calls", [False, True])
def test_stages_of_many_steps_are_their_mean_number_at_once(tmp_path, run, has_calls):
    write_stages(run, range(1, 71))
    if has_calls:
        with BlockLog(run.path / "calls", ModelCall) as log:
            log.add(ModelCall(time_s=BEGAN_S, duration_s=1.0, server=SERVER))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        address = f"/runs/r/timeline?from={BEGAN_S + 101}&to={BEGAN_S + 695}&width=400"
        whole = ui.get(address)
        near = ui.get(f"/runs/r/timeline?from={BEGAN_S + 100}&to={BEGAN_S + 200}")
        rows = {one["source"]: one for one in whole["rows"]}
        names = {"environment math", "environment math: waiting"}
        assert set(rows) == names | (set() if has_calls else {SERVER})
        lasts_s = {"environment math": 1.0 + 3.0, "environment math: waiting": 1.5, SERVER: 3.5}
        for source, row in rows.items():
            total_s = sum(row["density"]["busy"]) * whole["bucket_s"]
            assert total_s == pytest.approx(59.5 * lasts_s[source], rel=0.02), source
            assert row["is_too_wide"]
        # Zoomed in, the bars themselves are there.
        bars = {one["source"]: one["bars"]["columns"] for one in near["rows"]}
        assert bars["environment math: waiting"]["name"] == ["waiting"] * 10
        assert bars["environment math"]["name"] == ["environment", "scoring"] * 10
        if not has_calls:
            assert bars[SERVER]["start_s"] == [BEGAN_S + 102.5 + 10 * at for at in range(10)]
            assert bars[SERVER]["address"][0] == "/runs/r/rollouts/11.0/0/1"


@pytest.mark.slow
def test_a_window_of_very_many_stages_is_their_mean_number_at_once(tmp_path, run):
    number = 80_000  # more than are read one by one
    columns = {
        "time_s": [BEGAN_S + 0.001 * (at // 2) + 0.5 * (at % 2) for at in range(number)],
        "group_id": [f"1.{at // 2}" for at in range(number)],
        "stage": ["environment" if at % 2 == 0 else "done" for at in range(number)],
        **{"environment": ["math"] * number, "server": [""] * number, "reason": [""] * number},
        **{"step": [1] * number, "attempt": [1] * number, "index": [0] * number},
        **{"call": [0] * number, "version": [0] * number},
    }
    path = run.path / "events" / "step-000001.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table(columns), path)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get(f"/runs/r/timeline?from={BEGAN_S}&to={BEGAN_S + 50}")
    (row,) = page["rows"]
    assert row["is_too_wide"]
    assert sum(row["density"]["busy"]) * page["bucket_s"] == pytest.approx(20_000, rel=0.01)


@pytest.mark.slow
def test_the_sums_of_stages_follow_the_files(tmp_path, run):
    write_stages(run, range(1, 71))
    address = f"/runs/r/timeline?from={BEGAN_S}&to={BEGAN_S + 700}&width=400"
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        ui.get(address)
        (run.path / "events" / "step-000007.jsonl").unlink()
        bad = run.path / "events" / "step-000008.parquet"
        bad.write_bytes(b"PAR1 and no more")
        (run.path / "events" / "step-000008.jsonl").unlink()
        page = ui.get(address)
    (row,) = (one for one in page["rows"] if one["source"] == "environment math: waiting")
    total_s = sum(row["density"]["busy"]) * page["bucket_s"]
    assert total_s == pytest.approx(68 * 1.5, rel=0.02)
    assert [one[:26] for one in page["index"]["problems"]] == ["events/step-000008.parquet"]


@pytest.mark.slow
def test_files_of_many_steps_show_what_those_of_each_step_did(tmp_path, run, monkeypatch):
    """A run of many steps merges them while its pages are open."""
    write_steps(run, range(1, 24), groups=1)
    write_stages(run, range(1, 24))
    for step in (7, 8, 19):
        run.write_attempts(step, [row(step, 0, index, attempt=2) for index in range(2)])
    with EventLog(run.events_path) as log:
        for step in range(1, 23):
            log.pack(step)
    window = f"from={BEGAN_S}&to={BEGAN_S + 230}"
    addresses = [
        f"/runs/r/timeline?{window}&width=400",
        f"/runs/r/timeline?from={BEGAN_S + 60}&to={BEGAN_S + 140}",
        "/runs/r/rollouts/7.0/0/1",
        "/runs/r/rollouts/22.0/0/1",
        "/runs/r/rollouts/8.0/1/2",
        "/runs/r/rollouts?attempts=all&limit=200",
        "/runs/r/rollouts?attempts=all&limit=200&q=step%201",
    ]
    changing = ("index", "now_s", "generated_s")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:

        def pages():
            for address in addresses:  # until everything is read
                ui.get(address)
            found = [ui.get(address) for address in addresses]
            return [{key: page[key] for key in page if key not in changing} for page in found]

        before = pages()
        assert before[2]["events"]["columns"]["stage"]
        assert before[2]["tokens"]
        monkeypatch.setattr(step_files, "STEPS_PER_FILE", 5)
        folders = (run.events_path, run.token_facts_path, run.rollouts_path, run.attempts_path)
        for folder in folders:
            step_files.merge(folder, up_to=20, options={})
            assert (folder / "steps-000016-000020.parquet").is_file()
            step_files.merge(folder, up_to=10, options={})
            assert not (folder / "step-000007.parquet").exists()
        assert pages() == before
        assert len(before[5]["columns"]["step"]) == before[5]["total"]
        assert {*before[6]["columns"]["step"]} == {1, *range(10, 20)}
        (run.events_path / "steps-000006-000010.parquet").write_bytes(b"PAR1 and no more")
        torn = ui.get(addresses[1])
        assert [one[:35] for one in torn["problems"]] == ["events/steps-000006-000010.parquet "]
        assert pages()[3] == before[3]
        run.write_rollouts(7, [row(7, 0, 5)])
        assert ui.get("/runs/r/rollouts?step_from=7&step_to=7")["columns"]["index"] == [5]
        assert ui.get("/runs/r/rollouts?q=step%207")["columns"]["index"] == [5]
        (run.rollouts_path / "steps-000006-000010.parquet").write_bytes(b"PAR1 and no more")
        (problem,) = ui.get("/runs/r/rollouts")["index"]["problems"]
        assert problem.startswith("rollouts/steps-000006-000010.parquet is left out")


def test_a_query_reads_one_file_of_many_steps_at_most(tmp_path, run, monkeypatch):
    write_steps(run, range(1, 13), groups=1)
    monkeypatch.setattr(step_files, "STEPS_PER_FILE", 5)
    step_files.merge(run.rollouts_path, up_to=10, options={})
    asked: list[set[str]] = []
    for module in (building, search):
        monkeypatch.setattr(
            module,
            "rows_of",
            lambda files: asked.append({one.file.name for one in files}) or rows_of(files),
        )
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/rollouts?q=of%20nobody")
    assert page["index"]["is_complete"]
    assert page["search"]["is_complete"]
    many = {"steps-000001-000005.parquet"}, {"steps-000006-000010.parquet"}
    own = {"step-000011.parquet", "step-000012.parquet"}
    assert all(names in many or names <= own for names in asked), asked
    assert all(asked.count(names) >= 2 for names in many)


def test_a_fleet_is_shown_by_its_quantiles_and_outliers(tmp_path, run):
    with BlockLog(run.path / "gauges", GaugeSample) as log:
        for gpu in range(72):
            for at in range(5):
                value = 0.2 if gpu == 40 else 0.9 + 0.001 * (gpu % 7)
                source = f"node n{gpu // 8} gpu {gpu % 8}"
                log.add(
                    GaugeSample(
                        time_s=BEGAN_S + at, source=source, name="gpu/used_share", value=value
                    )
                )
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/infra")
        assert page["is_fleet"]
        assert [one["source"] for one in page["outliers"]] == ["node n5 gpu 0"]
        assert [one["source"] for one in page["series"]] == ["node n5 gpu 0"]
        (fleet,) = page["fleet"]
        assert fleet["p50"] == pytest.approx([0.903] * len(fleet["p50"]))
        chosen = ui.get("/runs/r/infra?source=node%20n1%20gpu%201")["series"]
        assert [one["source"] for one in chosen] == ["node n1 gpu 1"]


def test_logs_are_tailed(tmp_path, run):
    log = run.logs_path / "a.log"
    log.write_text("one\ntwo\n")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/logs")
        with log.open("a") as stream:
            stream.write("three\nfou")
        # A last line counts as complete when nothing was added for two seconds: not yet.
        os.utime(log, (time.time() + 3600, time.time() + 3600))
        (run.logs_path / "b.log").write_text("from another\n")
        newer = ui.get(f"/runs/r/logs?direction=newer&cursor={page['newer']}")
        assert sorted(newer["lines"]["columns"]["message"]) == ["from another", "three"]
        with log.open("a") as stream:
            stream.write("r\n")
        newest = ui.get(f"/runs/r/logs?direction=newer&cursor={newer['newer']}")
        assert newest["lines"]["columns"]["message"] == ["four"]
        log.write_text("new\n")
        anew = ui.get(f"/runs/r/logs?direction=newer&cursor={newest['newer']}")
        assert anew["lines"]["columns"]["message"] == ["new"]


def test_a_log_of_many_blocks_is_read_backwards_line_by_line(tmp_path, run):
    lines = [f"2026-01-01 00:00:{at % 60:02d} line {at} {'x' * (at % 900)}" for at in range(2000)]
    (run.logs_path / "a.log").write_text("\n".join(lines) + "\n")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        seen, cursor = [], ""
        while cursor is not None:
            page = ui.get(f"/runs/r/logs?limit=450&cursor={cursor}")
            seen = page["lines"]["columns"]["message"] + seen
            cursor = page["older"]
    assert seen == lines


def test_files_without_columns_that_came_later_are_read_beside_others(tmp_path, run):
    write_steps(run, range(1, 3), groups=1)
    path = run.rollouts_path / "step-000001.parquet"
    older = pq.read_table(path).drop_columns(
        ["attempt", "tags", "num_http_retries", "status_reason", "chains", "turns"]
    )
    pq.write_table(older, path)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/rollouts?sort=step")
        assert page["index"]["problems"] == []
        assert page["columns"]["attempt"] == [1] * 8
        rollout = ui.get("/runs/r/rollouts/1.0/0/1")
        assert rollout["tokens"] is None
        assert rollout["row"]["step"] == 1


def test_a_row_of_a_large_row_group_is_found(tmp_path):
    path = tmp_path / "step-000001.parquet"
    rows = [row(1, group, index) for group in range(60) for index in range(4)]
    write_rows(path, rows)
    assert pq.ParquetFile(path).num_row_groups == 1
    assert [read_row(path, at) for at in (0, 63, 64, 65, 239)] == [
        rows[at] for at in (0, 63, 64, 65, 239)
    ]


def test_chosen_rows_are_read_in_one_pass_over_all_row_groups(tmp_path, monkeypatch):
    path = tmp_path / "step-000001.parquet"
    rows = [row(1, group, index) for group in range(60) for index in range(4)]
    write_rows(path, rows, chunk_bytes=200_000)
    assert pq.ParquetFile(path).num_row_groups > 1
    passes: list[int] = []
    read = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, **given: passes.extend(given["row_groups"]) or read(self, **given),
    )
    chosen = [239, 0, 65, 64, 1, 130]
    assert read_chosen(path, chosen) == [rows[at] for at in chosen]
    assert len(passes) == len(set(passes)) > 1
    with pytest.raises(ConfigError, match="has 240 rows, and row 240 "):
        read_chosen(path, [3, 240])


def test_one_that_differs_is_named_where_all_others_are_the_same(tmp_path, run):
    """As clocks are: their median distance from the median is 0."""
    with BlockLog(run.path / "gauges", GaugeSample) as log:
        for gpu in range(64):
            meters = {
                "gpu/sm_clock_hertz": 1.2e9 if gpu == 7 else 1.98e9,
                "gpu/temperature_celsius": 60.5 if gpu == 8 else 60.0,
                "gpu/used_share": 1.0 if gpu % 2 else 0.5,
            }
            for name, value in meters.items():
                source = f"node n{gpu // 8} gpu {gpu % 8}"
                log.add(GaugeSample(time_s=BEGAN_S, source=source, name=name, value=value))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = ui.get("/runs/r/infra")["outliers"]
    assert len(found) == 1
    assert found[0]["source"].endswith("n0 gpu 7")
    assert (found[0]["value"], found[0]["median"]) == (1.2e9, 1.98e9)
    assert found[0]["deviations"] < -10


def test_a_trace_that_is_cut_has_all_sources_up_to_a_moment_and_says_it(tmp_path, run, monkeypatch):
    number = 2_300
    monkeypatch.setattr("telescope_ui.pages.timeline.MAX_TRACE_SPANS", 2_000)
    columns = {
        "time_s": [BEGAN_S + 0.001 * (at // 2) for at in range(number)],
        "duration_s": [0.5] * number,
        "server": [f"http://127.0.0.1:{at % 2}" for at in range(number)],
        "group_id": ["1.0"] * number,
        **{name: [1] * number for name in ("index", "attempt", "call", "step")},
    }
    names = [field for field in ModelCall.__dataclass_fields__ if field not in columns]
    nothing = {name: [None] * number for name in names}
    (run.path / "calls").mkdir()
    pq.write_table(pa.table({**columns, **nothing}), run.path / "calls" / "000001.parquet")
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        trace = ui.get("/runs/r/timeline/trace.json")
        page = ui.get("/runs/r/timeline")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2_000
    about = trace["otherData"]
    assert about["is_cut"]
    assert about["to"] == pytest.approx(BEGAN_S + 1.0)
    assert f"from={BEGAN_S + 1.0:.3f}" in about["notes"][0]
    by_source = [sum(one["pid"] == pid for one in spans) for pid in (1, 2)]
    assert by_source == [1_000, 1_000]
    assert (page["num_spans"], page["max_trace_spans"]) == (number, 2_000)
