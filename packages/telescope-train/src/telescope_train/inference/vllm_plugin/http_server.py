"""vLLM's HTTP server: its guard, large frames, and clients that are busy for a while."""

from typing import Any

import uvicorn

from telescope_train.inference.vllm_plugin.guard import Guard
from telescope_train.inference.wire import MAX_FRAME_BYTES


def install(secret: str) -> None:
    """Change the defaults of every server of this process; it asks for `secret`, if there is one.

    vLLM passes none of these options on.
    """
    config = uvicorn.Config

    def configured(app: Any, *arguments: Any, **options: Any) -> uvicorn.Config:
        # By default a client that does not answer a ping within 20 s is taken for dead, and a
        # driver may be busy for longer, for example while it writes a large step. A client that is
        # really gone closes its socket, or its address stops answering.
        sockets = {"ws_max_size": MAX_FRAME_BYTES, "ws_ping_timeout": None}
        guarded = Guard(app, secret) if secret else app
        return config(guarded, *arguments, **{**sockets, **options})

    uvicorn.Config = configured  # type: ignore[assignment,misc]
