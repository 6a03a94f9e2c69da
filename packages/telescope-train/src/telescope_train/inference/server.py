"""One vLLM server as a process of its own: start, wait until healthy, notice death, end.

The command line is the same on CPU and GPU; what differs is in `ServerSettings.arguments`.
Log-probs are those of the distribution that was sampled (`processed_logprobs`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from telescope_core.errors import ProcessDiedError
from telescope_train.cluster.ports import free_port, require_free_port
from telescope_train.models.device import machine_device

SERVED_MODEL_NAME = "policy"
ENGINE_THREAD_VARIABLE = "TELESCOPE_VLLM_ENGINE_THREAD"
"""Set to 1, the engine runs in the API server's process (`vllm_plugin.engine_thread`)."""
CPU_KERNELS_VARIABLE = "TELESCOPE_VLLM_CPU_KERNELS"
"""Set to 1, an engine in the API server's process computes with fused kernels on CPU
(`vllm_plugin.cpu_kernels`)."""
STARTUP_DEADLINE_S = 300.0
_POLL_S = 0.1
_TOKEN_PLANE = "telescope_train.inference.vllm_plugin.token_plane.TokenPlane"
_IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Where the model computes on CPU: in the engine's own process. vLLM's default there is a process
beside it, which spins while it waits (40 % of its time, taken from the trainer's core). Given by
import path, because the short name `uni` is turned back into that default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What one server serves, and where."""

    model_path: str
    host: str = "127.0.0.1"
    port: int
    log_path: Path
    device: str = "cpu"
    """`cpu` or `cuda`."""
    num_threads: int = 1
    """CPU threads that compute; without meaning on a GPU."""
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    weight_transport: str | None = None
    """Name of a vLLM weight-transfer engine; None = the weights never change."""
    trust_remote_code: bool = False

    @property
    def base_url(self) -> str:
        """Root of the server, without a trailing slash."""
        return f"http://{self.host}:{self.port}"

    def arguments(self) -> list[str]:
        """Return the command line."""
        arguments = [
            *(sys.executable, "-m", "telescope_train.inference.vllm_plugin.main"),
            *("--model", self.model_path, "--served-model-name", SERVED_MODEL_NAME),
            *("--host", self.host, "--port", str(self.port), "--dtype", self.dtype),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--enable-scale-out", "--disable-uvicorn-access-log"),
            *("--middleware", _TOKEN_PLANE, "--scheduling-policy", "priority"),
        ]
        if self.max_model_len is not None:
            arguments += ["--max-model-len", str(self.max_model_len)]
        if self.device == "cpu":
            arguments += ["--enforce-eager", "--distributed-executor-backend", _IN_ENGINE]
            # There is no device to keep busy while the next step is scheduled.
            arguments.append("--no-async-scheduling")
        else:
            arguments += ["--gpu-memory-utilization", str(self.gpu_memory_utilization)]
        if self.weight_transport is not None:
            arguments += [
                *(
                    "--worker-extension-cls",
                    "telescope_train.weights.vllm_extension.WorkerExtension",
                ),
                *("--weight-transfer-config", json.dumps({"backend": self.weight_transport})),
            ]
        if self.trust_remote_code:
            arguments.append("--trust-remote-code")
        return arguments

    def environment(self) -> dict[str, str]:
        """Return the variables the server runs under."""
        environment = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        if self.device == "cpu":
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            environment["OMP_NUM_THREADS"] = str(self.num_threads)
            # Threads that wait for each other would spin on cores that the trainer uses as well.
            environment.setdefault("OMP_WAIT_POLICY", "passive")
            # The scheduler places threads better than fixed cores that the trainer uses as well.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            environment.setdefault(ENGINE_THREAD_VARIABLE, "1")
            environment.setdefault(CPU_KERNELS_VARIABLE, "1")
            # Nothing is compiled with enforce-eager but one helper of the sampler: it would cost
            # the first request 20 s of C++ compilation and gains nothing measurable.
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        return environment


class ServerProcess:
    """A running server. `close` ends it and everything it started."""

    def __init__(self, settings: ServerSettings) -> None:
        require_free_port(settings.host, settings.port)
        settings.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self._was_healthy = False
        self._log: IO[bytes] = settings.log_path.open("ab")
        self._process = subprocess.Popen(
            settings.arguments(),
            env=settings.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._watchdog: int | None = _start_watchdog(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return self._process.pid

    def check(self) -> None:
        """Raise ProcessDiedError when the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ProcessDiedError(
                f"inference server at {self.settings.base_url} (pid {self.pid}) died "
                f"{_describe_exit(code)}; its log is {self.settings.log_path}, which ends:\n"
                f"{tail(self.settings.log_path)}"
            )

    def check_engine(self) -> None:
        """Raise ProcessDiedError when its engine, a process of its own, is gone.

        It then answers 503, or has stopped listening while it waits for the requests of an engine
        that will never answer. A server that is only slow to answer is left alone.
        """
        if not self._was_healthy:
            return
        try:
            urlopen(f"{self.settings.base_url}/health", timeout=5.0).close()
        except HTTPError as error:
            is_gone = error.code == HTTPStatus.SERVICE_UNAVAILABLE
        except URLError as error:
            is_gone = isinstance(error.reason, ConnectionRefusedError)
        except OSError:
            return
        else:
            return
        if is_gone:
            raise ProcessDiedError(
                f"the engine of the inference server at {self.settings.base_url} (pid {self.pid}) "
                f"died; its log is {self.settings.log_path}, which ends:\n"
                f"{tail(self.settings.log_path)}"
            )

    def is_healthy(self) -> bool:
        """Whether it answers its health check; raises ProcessDiedError when it has ended."""
        self.check()
        try:
            with urlopen(f"{self.settings.base_url}/health", timeout=5.0) as reply:
                self._was_healthy = reply.status == HTTPStatus.OK
                return self._was_healthy
        except OSError:  # nobody listens yet, or the answer is not 200
            return False

    def wait_until_healthy(self, deadline_s: float = STARTUP_DEADLINE_S) -> None:
        """Return once it answers; raises ProcessDiedError at death or after `deadline_s`."""
        give_up_s = time.monotonic() + deadline_s
        while not self.is_healthy():
            if time.monotonic() > give_up_s:
                raise ProcessDiedError(
                    f"inference server at {self.settings.base_url} did not answer its health "
                    f"check within {deadline_s:g} s; its log is {self.settings.log_path}"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the server and its children. Idempotent."""
        if self._process.poll() is None:
            _signal_group(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # the SIGKILL below ends it then
                self._process.wait(timeout=5.0)
        _signal_group(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)
        if self._watchdog is not None:
            os.write(self._watchdog, b"closed\n")
            os.close(self._watchdog)
            self._watchdog = None
        self._log.close()


@contextmanager
def running(
    settings: ServerSettings, *, deadline_s: float = STARTUP_DEADLINE_S
) -> Iterator[ServerProcess]:
    """Run a server for as long as the context lasts; it is healthy from the beginning."""
    server = ServerProcess(settings)
    try:
        server.wait_until_healthy(deadline_s)
        yield server
    finally:
        server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    model: str


@contextmanager
def serve_model(
    model_path: str,
    *,
    log_path: Path,
    port: int | None = None,
    max_model_len: int | None = None,
) -> Iterator[ServedModel]:
    """Serve `model_path` for as long as the context lasts, on a free port unless one is given."""
    device = machine_device()
    settings = ServerSettings(
        model_path=model_path,
        port=port if port is not None else free_port(),
        log_path=log_path,
        device=device,
        num_threads=max(1, (os.cpu_count() or 1) - 1),
        dtype="float32" if device == "cpu" else "auto",
        max_model_len=max_model_len,
    )
    with running(settings):
        yield ServedModel(base_url=f"{settings.base_url}/v1", model=SERVED_MODEL_NAME)


def tail(path: Path, *, num_lines: int = 15) -> str:
    """Return the last lines of a log."""
    if not path.exists():
        return "(no log was written)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def _describe_exit(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"of signal {signal.Signals(-code).name}"


def _signal_group(pid: int, signal_number: int) -> None:
    with suppress(ProcessLookupError):  # every member has ended
        os.killpg(pid, signal_number)


def _start_watchdog(group: int) -> int:
    """Start a process that ends `group` once this one is gone; returns the pipe that holds it.

    It waits for a line on the pipe, whose other end only this process has: even SIGKILL closes
    that. It is nobody's child, so that whoever ends this process's children does not end it.
    """
    read_end, write_end = os.pipe()
    # A background job loses descriptor 0, so the pipe is kept as 3.
    script = f"exec 3<&0; (read -r line <&3 || kill -KILL -{group}) &"
    subprocess.run(
        ["sh", "-c", script],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    os.close(read_end)
    return write_end
