"""The command that becomes a vLLM server: `python -m telescope_train.inference.vllm_main ...`.

vLLM's own console script is not used: its lookup of the distribution `vllm` fails where the
CPU build is installed under another distribution name.

A vLLM server is three processes, and on CPU vLLM starts each anew, so that the same 10 s of
imports are paid three times in a row. With a single compute thread they can be forked instead.
With more, they must not be: a forked OpenMP pool hangs.
"""

import multiprocessing
import os
import runpy
from multiprocessing.context import BaseContext

FORK_VARIABLE = "TELESCOPE_VLLM_FORK"
"""Set to 1 by whoever starts the server and knows that it computes on one CPU thread."""


def main() -> None:
    """Run vLLM's OpenAI-compatible server with this process's arguments."""
    if os.environ.get(FORK_VARIABLE) == "1":
        _fork_instead_of_spawning()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _fork_instead_of_spawning() -> None:
    # The modules that start processes import this function by name: replace it before they load.
    import vllm.utils.system_utils

    def fork_context() -> BaseContext:
        return multiprocessing.get_context("fork")

    vllm.utils.system_utils.get_mp_context = fork_context


if __name__ == "__main__":
    main()
