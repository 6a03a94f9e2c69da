"""How long a thread waited for a processor, which a busy machine adds to other times."""

import asyncio
import threading
import time
from collections import deque
from pathlib import Path

from telescope_core.environments.loop_watch import Block

_BEAT_S = 0.01
_NUM_BEATS = 2000


class WaitClock:
    """Reads the kernel's record of how long the calling thread waited; zero if there is none."""

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._beats: deque[tuple[float, float]] = deque(maxlen=_NUM_BEATS)

    def waited_s(self) -> float:
        """Return the seconds for which the thread was ready to run but did not, since it began."""
        try:
            return int(self._path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def start(self) -> None:
        """Take readings repeatedly, on the running event loop of the thread."""
        self._beats.append((time.monotonic(), self.waited_s()))
        asyncio.get_running_loop().call_later(_BEAT_S, self.start)

    def own_s(self, block: Block) -> float:
        """Return the seconds that a block which just ended lasted, without the time it waited."""
        began_s = time.monotonic() - block.duration_s - 2 * _BEAT_S
        before = [waited for moment, waited in list(self._beats) if moment <= began_s]
        if not before:
            return block.duration_s
        return block.duration_s - (self.waited_s() - before[-1])
