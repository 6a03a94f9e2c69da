"""The program of a vLLM server: `python -m telescope_train.inference.vllm_plugin.main ...`.

vLLM's own console script is not used. It looks up the distribution `vllm`, which fails where the
CPU build is installed under another distribution name.
"""

import os
import runpy
import sys

from telescope_core.base.collector import rare_collections
from telescope_train.inference.server import CPU_KERNELS_VARIABLE, ENGINE_THREAD_VARIABLE
from telescope_train.inference.vllm_plugin import (
    adapter,
    cpu_kernels,
    engine_thread,
    http_server,
    seeded_draws,
)
from telescope_train.inference.wire import IDENTITY_VARIABLE, SECRET_VARIABLE, SOCKET_VARIABLE


def main() -> None:
    """Run vLLM's OpenAI-compatible server with this process's arguments."""
    # All must be in place before vLLM creates its engine and its model.
    adapter.name_in_every_request()
    if os.environ.get(ENGINE_THREAD_VARIABLE) == "1":
        engine_thread.install()
        seeded_draws.install()
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
    with rare_collections():
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
    # The server has closed. Shutting down the interpreter with everything that vLLM loaded would
    # take seconds more, while whoever started the server waits for its memory and its port.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
