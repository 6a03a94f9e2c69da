"""The timeline of a run: who did what when, on one clock."""

import asyncio
import re
import time
from pathlib import Path

import pytest
import torch

from telescope_core.base import clock
from telescope_core.errors import ProcessDiedError
from telescope_core.records.timeline import ModelCall, TimelineSpan
from telescope_train.observability.calls import CallEnd, Caller, CallLog, ServerTiming
from telescope_train.observability.spans import SilentRecorder, SpanRecorder
from telescope_train.observability.timeline import MeasuredSpan, RankSpans, TakenSpans, Timeline
from telescope_train.step.metrics import _SPANS

ROOT = Path(__file__).parents[3]


def test_a_recorder_tells_each_span_once_with_its_step():
    recorder = SpanRecorder()
    before_s = time.monotonic()
    recorder.begin(3)
    with recorder.span("forward", microbatch=0):
        pass
    with recorder.span("backward", microbatch=0), recorder.span("gradient reduction"):
        pass
    taken = recorder.take()
    assert [(one.name, one.step, one.microbatch) for one in taken.spans] == [
        ("forward", 3, 0),
        ("gradient reduction", 3, None),
        ("backward", 3, 0),
    ]
    forward, reduction, backward = taken.spans
    assert before_s <= forward.begin_s <= backward.begin_s <= reduction.begin_s <= taken.now_s
    assert reduction.duration_s <= backward.duration_s
    assert recorder.take().spans == []


def test_a_span_that_fails_is_told_as_well():
    recorder = SpanRecorder()
    with pytest.raises(MemoryError), recorder.span("forward"):
        raise MemoryError
    assert [one.name for one in recorder.take().spans] == ["forward"]


def test_without_events_the_time_to_start_work_on_a_gpu_is_no_span():
    """Made without a GPU: a recorder that times nothing there must not touch it either."""
    recorder = SpanRecorder(torch.device("cuda"), times_gpu=False)
    recorder.begin(1)
    with recorder.span("forward", microbatch=0):
        pass
    with recorder.span("metrics", on_cpu=True):
        pass
    (metrics,) = recorder.take().spans
    assert (metrics.name, metrics.step) == ("metrics", 1)


def test_before_its_first_step_a_recorder_of_a_gpu_has_no_clock_to_tell_by():
    recorder = SpanRecorder(torch.device("cuda"))
    with recorder.span("forward"):
        pass
    assert recorder.take().spans == []


def test_a_silent_recorder_tells_nothing():
    recorder = SilentRecorder()
    recorder.begin(1)
    with recorder.span("forward"):
        pass
    assert recorder.take().spans == []


def test_the_driver_notes_spans_and_what_ended_them():
    found: list[TimelineSpan] = []
    timeline = Timeline(found.append)
    before_s = time.time()
    with timeline.span("publish weights", step=2, version=2):
        pass
    with pytest.raises(KeyError), timeline.span("train", step=3):
        raise KeyError
    timeline.moment("worker replaced", "environment maze", "it was killed")
    assert [(one.name, one.source, one.step, one.version, one.note) for one in found] == [
        ("publish weights", "driver", 2, 2, ""),
        ("train", "driver", 3, None, "ended by KeyError"),
        ("worker replaced", "environment maze", None, None, "it was killed"),
    ]
    assert all(abs(one.time_s - before_s) < 60 for one in found)


class SkewedRank:
    """A rank whose clock is wrong, and which may have died."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self.done: list[tuple[str, float, float]] = []
        """(name, begin on the true clock, seconds)"""
        self.is_dead = False

    async def taken_spans(self) -> TakenSpans:
        if self.is_dead:
            raise ProcessDiedError("trainer rank 1 does not answer")
        done, self.done = self.done, []
        spans = [
            MeasuredSpan(name, begin_s + self.ahead_s, duration_s, 1, None)
            for name, begin_s, duration_s in done
        ]
        return TakenSpans(time.monotonic() + self.ahead_s, spans)


def test_spans_of_ranks_are_placed_on_the_drivers_clock():
    async def main() -> None:
        found: list[TimelineSpan] = []
        timeline = Timeline(found.append)
        ranks = [SkewedRank(1e6), SkewedRank(-50.0)]
        asking = RankSpans(lambda: ranks, timeline)
        begun_s = time.monotonic()
        for rank in ranks:
            rank.done.append(("forward", begun_s, 0.5))
        await asking.ask()
        assert [(one.source, one.name, one.duration_s) for one in found] == [
            ("rank 0", "forward", 0.5),
            ("rank 1", "forward", 0.5),
        ]
        # Half of what an answer took is the largest error; the machine may be busy.
        limit_s = time.monotonic() - begun_s
        assert all(abs(one.time_s - clock.at(begun_s)) <= limit_s for one in found)

        ranks[1].is_dead = True
        ranks[0].done.append(("backward", begun_s + 1, 0.5))
        await asking.ask()
        assert [one.name for one in found] == ["forward", "forward", "backward"]
        ranks[1] = SkewedRank(7.0)
        ranks[1].done.append(("forward", begun_s + 2, 0.5))
        await asking.ask()
        again_s = found[-1].time_s - clock.at(begun_s + 2)
        assert abs(again_s) < 5, "the clock of the rank that is gone was used"

    asyncio.run(main())


def test_an_answer_under_way_when_asking_ends_is_recorded():
    class SlowRank(SkewedRank):
        """A rank whose answer leaves it, and arrives later."""

        def __init__(self) -> None:
            super().__init__(0.0)
            self.has_answered = asyncio.Event()
            self.arrives = asyncio.Event()

        async def taken_spans(self) -> TakenSpans:
            taken = await super().taken_spans()
            self.has_answered.set()
            await self.arrives.wait()
            return taken

    async def main() -> None:
        found: list[TimelineSpan] = []
        rank = SlowRank()
        rank.done.append(("optimizer", time.monotonic(), 0.5))
        asking = RankSpans(lambda: [rank], Timeline(found.append))
        asked = asyncio.create_task(asking.ask())
        await rank.has_answered.wait()
        asked.cancel()
        await asyncio.wait([asked])
        rank.arrives.set()
        await asking.ask_at_end()
        assert [one.name for one in found] == ["optimizer"]

    asyncio.run(main())


def test_a_call_is_recorded_with_what_the_server_measured():
    found: list[ModelCall] = []
    log = CallLog(found.append)
    caller = Caller(environment="maze", group_id="b0p1", index=2, attempt=1, call=3, step=1)
    timing = ServerTiming(
        queue_s=0.1, first_token_s=0.4, prefill_s=0.25, decode_s=1.5, num_cached_tokens=16
    )
    sent_s = time.monotonic()
    end = CallEnd(
        server="http://a",
        version=4,
        sent_s=sent_s,
        ended_s=sent_s + 2,
        num_prompt_tokens=20,
        num_completion_tokens=7,
        timing=timing,
    )
    log.ended(caller, end)
    (call,) = found
    assert (call.group_id, call.index, call.call, call.step, call.version) == ("b0p1", 2, 3, 1, 4)
    assert (call.queue_s, call.prefill_s, call.decode_s) == (0.1, 0.25, 1.5)
    assert (call.num_prompt_tokens, call.num_cached_tokens, call.num_completion_tokens) == (
        20,
        16,
        7,
    )
    assert call.duration_s == pytest.approx(2)
    assert abs(call.time_s - time.time()) < 60


def test_every_name_of_a_span_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
    (table,) = re.findall(r"^\| source \| names \|\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    sources = (ROOT / "packages" / "telescope-train" / "src" / "telescope_train").rglob("*.py")
    texts = [path.read_text() for path in sources]
    literal = r"\.(?:span|moment)\(\s*\"([^\"]+)\""
    names = {name for text in texts for name in re.findall(literal, text)} | set(_SPANS.values())
    assert {"forward", "stage weights", "worker replaced", "publish weights"} <= names
    assert names <= set(re.findall(r"`([^`]+)`", table))
