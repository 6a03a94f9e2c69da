"""The events of a run: readable while it goes on, after a kill, and when a step is complete."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.records.events import AttemptEvent, EventLog, Stage, drop_events, read_events


def event(step: int, stage: Stage = Stage.DRAWN, *, group: int = 0, **fields) -> AttemptEvent:
    return AttemptEvent(
        time_s=fields.pop("time_s", 0.0),
        step=step,
        environment="e",
        group_id=f"{step - 1}.{group}",
        index=0,
        attempt=1,
        stage=stage,
        **fields,
    )


ALL = (
    event(1, Stage.DRAWN, time_s=1.0),
    event(1, Stage.GENERATING, time_s=2.0, call=1, server="http://a", version=0),
    event(1, Stage.FAILED, time_s=3.0, reason="TimeoutError"),
)


async def test_events_are_the_same_packed_or_not_and_have_the_time_of_day(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    for one in ALL:
        log.add(one)
    log.flush()
    first = read_events(tmp_path / "events")
    assert [(e.stage, e.call, e.server, e.version, e.reason) for e in first] == [
        (e.stage, e.call, e.server, e.version, e.reason) for e in ALL
    ]
    assert [e.time_s - first[0].time_s for e in first] == pytest.approx([0.0, 1.0, 2.0])
    now_s = time.time() - asyncio.get_running_loop().time()
    assert first[0].time_s == pytest.approx(now_s + 1.0, abs=60.0)
    log.pack(1)
    assert read_events(tmp_path / "events") == first
    assert [path.name for path in (tmp_path / "events").iterdir()] == ["step-000001.parquet"]
    log.pack(2)
    assert read_events(tmp_path / "events", step=2) == []


@pytest.mark.slow
async def test_events_are_soon_on_the_disk(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events") as log:
        log.add(ALL[0])
        async with asyncio.timeout(60):
            while not read_events(tmp_path / "events"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_lines_of_earlier_and_later_versions_are_read(tmp_path: Path) -> None:
    whole = {"time_s": 1.0, "step": 1, "environment": "e", "group_id": "0.0", "index": 0}
    whole |= {"attempt": 1, "stage": "drawn"}
    rows = [whole | {"call": 0, "server": "", "version": None, "reason": ""}, whole | {"color": 1}]
    (tmp_path / "step-000001.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    assert read_events(tmp_path) == [event(1, time_s=1.0)] * 2


async def test_a_torn_last_line_and_a_torn_packing_lose_nothing_else(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for one in ALL:
        log.add(one)
    log.flush()
    lines = tmp_path / "step-000001.jsonl"
    whole = lines.read_text()
    lines.write_text(whole + '{"time_s": 3, "st')
    assert len(read_events(tmp_path)) == 3
    log.add(ALL[0])
    log.flush()
    assert len(read_events(tmp_path)) == 4, "the torn line does not swallow the next one"
    log.pack(1)
    lines.write_text(whole)
    assert len(read_events(tmp_path)) == 4, "killed after packing, before the lines were removed"
    (tmp_path / "step-000001.parquet").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"step-000001\.parquet is not a readable file"):
        read_events(tmp_path)


async def test_half_a_surrogate_pair_in_a_reason_is_kept(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add(event(1, Stage.FAILED, reason="\ud800"))
    log.add(event(1, Stage.FAILED, reason="\u00e9"))
    log.flush()
    assert [one.reason for one in read_events(tmp_path)] == ["\ud800", "\u00e9"]


async def test_a_resumed_run_drops_what_it_plays_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in (1, 2, 3):
        for group in (0, 1):
            log.add(event(step, group=group))
    log.flush()
    log.pack(1)
    log.pack(2)
    drop_events(tmp_path, after=1, is_repeated=lambda event: event.group_id != "1.1")
    assert [one.group_id for one in read_events(tmp_path)] == ["0.0", "0.1", "1.1"]
    again = EventLog(tmp_path)
    again.add(event(2, group=0))
    again.pack(2)
    assert sorted(one.group_id for one in read_events(tmp_path)) == ["0.0", "0.1", "1.0", "1.1"]


async def test_a_run_folder_without_events_has_none(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config={})
    assert folder.events() == []
    log = EventLog(folder.events_path)
    log.add(ALL[0])
    log.flush()
    assert len(folder.events(step=1)) == 1
