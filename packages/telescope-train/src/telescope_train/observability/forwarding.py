"""`Forwarding`: forward the traces of servers, in a thread that nobody waits for.

receiver  -->  a bounded queue  -->  thread  -->  collector of the user's
"""

import logging
import queue
import time
from collections.abc import Callable
from threading import Lock, Thread
from urllib.parse import urlsplit

import httpx

from telescope_core.base.addresses import is_loopback
from telescope_core.base.errors import ConfigError

MOST_WAITING = 256
"""Most requests in the queue; further ones are dropped."""
SEND_S = 10.0
"""Seconds in which the collector must accept a request."""
_PROTOBUF = {"content-type": "application/x-protobuf"}
_LOGGER = logging.getLogger(__name__)


class Forwarding:
    """Forwards requests unchanged. Call `close` at the end."""

    def __init__(self, endpoint: str, *, warn: Callable[[str], None] = lambda text: None) -> None:
        """`warn` is called once, from any thread, with a text for people about lost requests."""
        self._endpoint = endpoint
        is_here = is_loopback(urlsplit(endpoint).hostname or "")
        try:
            # Proxies of the variables are for collectors that are elsewhere.
            self._client = httpx.Client(headers=_PROTOBUF, timeout=SEND_S, trust_env=not is_here)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot send spans to {endpoint} through the proxy that the environment variables "
                f"name: {error}; name one that speaks HTTP, or except the collector in no_proxy"
            ) from None
        self._warn = warn
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._holding = Lock()
        self._closes_s: float | None = None
        self.num_sent = 0
        self.num_lost = 0
        """Number of requests that the collector did not accept."""
        self._thread = Thread(target=self._work, name="traces of servers", daemon=True)
        self._thread.start()

    def put(self, content: bytes) -> None:
        """Forward `content`, from any thread; returns at once."""
        try:
            self._waiting.put_nowait(content)
        except queue.Full:
            self._lose(f"it is {MOST_WAITING} requests behind")

    def close(self, *, within_s: float) -> None:
        """Send the waiting spans, within `within_s` seconds; the rest is lost, and counted."""
        self._closes_s = time.monotonic() + within_s
        while self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=0.05)
                break
            except queue.Full:
                if time.monotonic() > self._closes_s:
                    break
        self._thread.join(max(0.0, self._closes_s - time.monotonic()))
        while not self._waiting.empty():
            if self._waiting.get_nowait() is not None:
                self._lose("the run has ended")
        if self.num_lost:
            _LOGGER.warning(
                "%d requests with spans of servers were not passed on to %s, %d were",
                self.num_lost,
                self._endpoint,
                self.num_sent,
            )

    def _work(self) -> None:
        with self._client as client:
            while (content := self._waiting.get()) is not None:
                try:
                    client.post(self._endpoint, content=content).raise_for_status()
                    self.num_sent += 1
                except httpx.HTTPError as error:
                    self._lose(f"{type(error).__name__}: {error}")
                if self._closes_s is not None and time.monotonic() > self._closes_s:
                    return

    def _lose(self, why: str) -> None:
        with self._holding:
            self.num_lost += 1
            is_first = self.num_lost == 1
        if is_first:
            self._warn(
                f"the collector at {self._endpoint} does not take all spans of inference servers: "
                f"{why}. The run goes on, and further ones that are lost are only counted in its "
                "log"
            )
