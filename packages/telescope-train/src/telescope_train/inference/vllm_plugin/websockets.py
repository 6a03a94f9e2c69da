"""How vLLM's HTTP server treats WebSockets: large frames, and clients that are busy for a while."""

from functools import partial

import uvicorn

from telescope_train.inference.wire import MAX_FRAME_BYTES


def install() -> None:
    """Change the defaults of every server of this process."""
    # vLLM passes neither option on. By default a client that does not answer a ping within 20 s
    # is taken for dead, and a driver may be busy for longer, for example while it writes a large
    # step. A client that is really gone closes its socket, or its address stops answering.
    uvicorn.Config = partial(  # type: ignore[misc]
        uvicorn.Config, ws_max_size=MAX_FRAME_BYTES, ws_ping_timeout=None
    )
