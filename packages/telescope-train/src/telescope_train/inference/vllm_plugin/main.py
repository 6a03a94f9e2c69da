"""The program of a vLLM server: `python -m telescope_train.inference.vllm_plugin.main ...`.

vLLM's own console script is not used. It looks up the distribution `vllm`, which fails where the
CPU build is installed under another distribution name.
"""

import os
import sys
from typing import Any

import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from telescope_core.base.collector import rare_collections
from telescope_train.inference.server import CPU_KERNELS_VARIABLE, ENGINE_THREAD_VARIABLE
from telescope_train.inference.wire import IDENTITY_VARIABLE, SECRET_VARIABLE, SOCKET_VARIABLE

# They import vLLM, whose objects stay: to look through them as often as by default would take a
# sixth of the time of that.
with rare_collections():
    from telescope_train.inference.vllm_plugin import (
        adapter,
        cpu_kernels,
        engine_thread,
        http_server,
    )


def main() -> None:
    """Run vLLM's OpenAI-compatible server with this process's arguments."""
    with rare_collections():
        _run()
    # The spans that vLLM's tracer has not sent yet, which it would do when the interpreter ends.
    if isinstance(provider := trace.get_tracer_provider(), TracerProvider):
        provider.shutdown()
    # The server has closed. Shutting down the interpreter with everything that vLLM loaded would
    # take seconds more, while whoever started the server waits for its memory and its port.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run() -> None:
    # All must be in place before vLLM creates its engine and its model.
    adapter.name_in_every_request()
    answer_for_every_engine()
    if os.environ.get(ENGINE_THREAD_VARIABLE) == "1":
        engine_thread.install()
        _spare_generators()
        # The kernels are registered in this process alone, so the engine has to be in it too.
        if os.environ.get(CPU_KERNELS_VARIABLE) == "1":
            sys.argv += cpu_kernels.install()
            adapter.install_cpu_kernel()
    # Taken out, so that no process that the engine starts, and no report of vLLM's, has them.
    secret, identity = (os.environ.pop(one, "") for one in (SECRET_VARIABLE, IDENTITY_VARIABLE))
    http_server.install(secret, identity)
    if descriptor := os.environ.pop(SOCKET_VARIABLE, ""):
        http_server.listen_on(int(descriptor))
    sys.stdout.write(f"this is the inference server {identity}\n")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def answer_for_every_engine() -> None:
    """Return what the workers of all engines say when they are asked, in one list.

    vLLM asks all engines of a data-parallel server and returns the answer of the first, so that
    weights which another one got wrong would not be found.
    """
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    async def collective_rpc_async(
        self: Any,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        asked = ("collective_rpc", method, timeout, args, kwargs)
        return [one for answers in await self.call_utility_all_async(*asked) for one in answers]

    DPLBAsyncMPClient.collective_rpc_async = collective_rpc_async


def _spare_generators() -> None:
    """Keep the generators of seeded requests from draws that are not used.

    vLLM draws a token at each step that a prompt takes, forgets all but the last one, and sets the
    request's generator back. Generators of a CPU cannot be set back, and the engine dies of that.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample: Any = CPUModelRunner._sample
    keep_books: Any = CPUModelRunner._bookkeeping_sync

    def _sample(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = self.input_batch
        forgotten = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        self._spared_generators = {
            index: batch.generators.pop(index) for index in forgotten if index in batch.generators
        }
        return sample(self, *arguments, **named)

    def _bookkeeping_sync(self: Any, *arguments: Any, **named: Any) -> Any:
        found = keep_books(self, *arguments, **named)
        self.input_batch.generators.update(self._spared_generators)
        return found

    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync


if __name__ == "__main__":
    main()
