"""The command that becomes a vLLM server: `python -m telescope_train.inference.vllm_main ...`.

vLLM's own console script is not used: its lookup of the distribution `vllm` fails where the
CPU build is installed under another distribution name.
"""

import os
import runpy

ENGINE_THREAD_VARIABLE = "TELESCOPE_VLLM_ENGINE_THREAD"
"""Set to 1 to run the engine in the API server's process (`vllm_plugin.engine_thread`)."""


def main() -> None:
    """Run vLLM's OpenAI-compatible server with this process's arguments."""
    if os.environ.get(ENGINE_THREAD_VARIABLE) == "1":
        from telescope_train.inference.vllm_plugin import engine_thread

        engine_thread.install()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
