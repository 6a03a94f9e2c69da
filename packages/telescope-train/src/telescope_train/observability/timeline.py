"""The timeline of a run: activities of the driver and of the ranks.

    driver  --span-->  Timeline  -->  timeline/ in the run folder
    ranks   <--asked once a second--  RankSpans  --^

All times are converted to the driver's clock: it notes when it asked a rank and when it got the
answer, so that bars are right even if the machines' clocks disagree.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from telescope_core.base import clock
from telescope_core.base.errors import ProcessDiedError
from telescope_core.base.types import WeightVersion
from telescope_core.records.timeline import TimelineSpan

ASK_EVERY_S = 1.0
ASKED_PER_S = 200
"""Most ranks that are asked per second, so that many ranks do not keep the driver busy."""
_LAST_ANSWER_S = 30.0
"""Dead ranks are known at once, and ranks that compute answer beside it: only a busy machine or a
rank that hangs takes as long."""
_REMEMBERED = 32
"""Number of answers used to estimate the difference of two clocks; the quickest one counts."""
DRIVER = "driver"
CHECKPOINTS = "checkpoints"
"""Source name for files that are written beside the steps."""


class Timeline:
    """Receives the spans of a run."""

    def __init__(self, add: Callable[[TimelineSpan], None]) -> None:
        """`add` must be quick, and must not fail."""
        self.add = add

    def note(self, name: str, begin_s: float, end_s: float, *, step: int | None = None) -> None:
        """Record a span of the driver between two times of the event loop."""
        self.add(
            TimelineSpan(
                time_s=clock.at(begin_s),
                duration_s=end_s - begin_s,
                name=name,
                source=DRIVER,
                step=step,
            )
        )

    def moment(self, name: str, source: str, note: str) -> None:
        """Record an event at the present time."""
        self.add(
            TimelineSpan(time_s=clock.now_s(), duration_s=0.0, name=name, source=source, note=note)
        )

    @contextmanager
    def span(
        self,
        name: str,
        *,
        step: int | None = None,
        version: WeightVersion | None = None,
        source: str = DRIVER,
    ) -> Generator[None]:
        """Record the duration of the block, also if it fails."""
        begin_s = clock.now_s()
        note = ""
        try:
            yield
        except BaseException as error:
            note = f"ended by {type(error).__name__}"
            raise
        finally:
            self.add(
                TimelineSpan(
                    time_s=begin_s,
                    duration_s=clock.now_s() - begin_s,
                    name=name,
                    source=source,
                    step=step,
                    version=version,
                    note=note,
                )
            )


UNRECORDED = Timeline(lambda span: None)
"""For loops outside of a run, such as simulations."""


class MeasuredSpan(NamedTuple):
    """An activity of a rank, on the rank's clock."""

    name: str
    begin_s: float
    """Value of `time.monotonic` on the rank's machine."""
    duration_s: float
    step: int | None
    microbatch: int | None


class TakenSpans(NamedTuple):
    """The spans of a rank since the last request."""

    now_s: float
    """Present time on the rank's clock."""
    spans: list[MeasuredSpan]
    """In the order of their ends."""


class TimedRank(Protocol):
    """A rank that reports its activities, also while it computes."""

    async def taken_spans(self) -> TakenSpans:
        """Return its spans since the last call."""
        ...


class RankSpans:
    """Fetches the spans of the ranks, and adds them to the timeline."""

    def __init__(self, ranks: Callable[[], Sequence[TimedRank]], timeline: Timeline) -> None:
        """`ranks` returns the present ones, which may have been restarted."""
        self._ranks = ranks
        self._timeline = timeline
        self._offsets: dict[int, _Offset] = {}
        self._answers: asyncio.Future[list[None]] | None = None

    async def run(self) -> None:
        """Fetch repeatedly, until canceled."""
        while True:
            await asyncio.sleep(max(ASK_EVERY_S, len(self._ranks()) / ASKED_PER_S))
            await self.ask()

    async def ask_at_end(self) -> None:
        """Fetch once more, from ranks that may be about to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWER_S):
                if self._answers is not None and not self._answers.done():
                    await self._answers
                await self.ask()

    async def ask(self) -> None:
        """Fetch from every rank once; dead ranks are ignored, as something else watches them."""
        ranks = self._ranks()
        asked = (self._ask(number, rank) for number, rank in enumerate(ranks))
        self._answers = asyncio.gather(*asked)
        # A rank forgets the spans that it hands over, so cancellation must not lose its answer.
        await asyncio.shield(self._answers)

    async def _ask(self, number: int, rank: TimedRank) -> None:
        asked_s = clock.now_s()
        try:
            taken = await rank.taken_spans()
        except ProcessDiedError:
            self._offsets.pop(number, None)
            return
        offset = self._offsets.setdefault(number, _Offset())
        offset.learn(asked_s, clock.now_s(), taken.now_s)
        for span in taken.spans:
            self._timeline.add(
                TimelineSpan(
                    time_s=span.begin_s + offset.seconds,
                    duration_s=span.duration_s,
                    name=span.name,
                    source=f"rank {number}",
                    step=span.step,
                    microbatch=span.microbatch,
                )
            )


class _Offset:
    """The difference between a rank's clock and the driver's."""

    def __init__(self) -> None:
        self._answers: list[tuple[float, float]] = []
        """(seconds that the answer took, difference)"""

    def learn(self, asked_s: float, answered_s: float, rank_s: float) -> None:
        """Use an answer: the rank's clock was read between request and reply."""
        difference_s = (asked_s + answered_s) / 2 - rank_s
        self._answers = [*self._answers[1 - _REMEMBERED :], (answered_s - asked_s, difference_s)]

    @property
    def seconds(self) -> float:
        """The difference; its error is at most half of the time of the quickest answer."""
        return min(self._answers)[1]
