"""Rate limits per caller: a bounded number of token buckets in memory."""

import time
from collections import OrderedDict
from http import HTTPStatus

from telescope_envs.server.refusal import Refusal

_MAX_CALLERS = 10_000


class Limit:
    """Allows each caller `count` actions per `period_s`, refilled evenly; 0 means no limit."""

    def __init__(self, what: str, count: int, period_s: float) -> None:
        self.what = what
        self.count = count
        self.period_s = period_s
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count one action of `caller`; raises Refusal (429) when it has none left."""
        if self.count and self._refilled(caller) < 1:
            raise self._refusal()
        self._spend(caller)

    def require(self, caller: str) -> None:
        """Raise Refusal (429) when `caller` has no action left, without counting one."""
        if self.count and self._refilled(caller) < 1:
            raise self._refusal()

    def _refilled(self, caller: str) -> float:
        left, at = self._left.get(caller, (float(self.count), time.monotonic()))
        now = time.monotonic()
        return min(self.count, left + (now - at) * self.count / self.period_s)

    def _spend(self, caller: str) -> None:
        self._left[caller] = (self._refilled(caller) - 1, time.monotonic())
        self._left.move_to_end(caller)
        if len(self._left) > _MAX_CALLERS:
            self._left.popitem(last=False)

    def _refusal(self) -> Refusal:
        return Refusal(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"more than {self.count} {self.what} in {self.period_s:g} s",
            "wait a minute and try again",
        )
