"""One vLLM server as a process: start it, wait until it is healthy, detect its death.

`ServerSettings.arguments` holds all differences between CPU and GPU. Log-probs are those of the
distribution that was sampled from (`processed_logprobs`).

The socket of a server is made here and handed to it, so that nobody else can take its port. Each
start has an identity, which clients at its address use to know that it is the server they mean.
"""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import quote

import psutil

from telescope_core.base import interrupts
from telescope_core.base.addresses import in_url, reached_directly
from telescope_core.base.errors import ProcessDiedError, TelescopeError
from telescope_core.base.secret_names import secret_values
from telescope_core.base.terminal import escaped
from telescope_core.records.output_logs import INFERENCE, OutputLog
from telescope_train.chat.formats import choose_format
from telescope_train.chat.template import template_in
from telescope_train.cluster.leftovers import ScratchFolder, Watchdog
from telescope_train.cluster.ports import cannot_listen, holder_of, listening
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.inference.death_cause import DeathCause
from telescope_train.inference.servers import ServerDiedError
from telescope_train.inference.wire import (
    ENGINE_PATH,
    IDENTITY_VARIABLE,
    OTHER_SERVER_STATUS,
    SECRET_VARIABLE,
    SOCKET_VARIABLE,
    WEIGHT_ENGINE,
    root_of,
    secret_headers,
)
from telescope_train.models.device import machine_device, usable_cores
from telescope_train.models.served_adapter import ServedAdapter
from telescope_train.observability.genai_names import RUN as RUN_ATTRIBUTE
from telescope_train.observability.genai_names import SERVER as SERVER_ATTRIBUTE
from telescope_train.observability.genai_names import SERVER_SERVICE

SERVED_MODEL_NAME = "policy"
ENGINE_THREAD_VARIABLE = "TELESCOPE_VLLM_ENGINE_THREAD"
"""Environment variable; 1 = the engine runs in the API server's process
(`vllm_plugin.engine_thread`)."""
SCRATCH_PREFIX = "telescope-vllm-"
"""Prefix of the folder for a server's temporary files."""
MAX_TEMP_PATH = 46
"""Bytes of the longest temporary folder in which vLLM's sockets have room: of the 107 of a path, it
uses 37, and the folder of a server 24."""
CPU_KERNELS_VARIABLE = "TELESCOPE_VLLM_CPU_KERNELS"
"""With the value 1, an engine in the API server's process computes with fused kernels on CPU
(`vllm_plugin.cpu_kernels`)."""
STARTUP_DEADLINE_S = 300.0
"""Longest time without output of a server that starts, in seconds."""
_TRACES_EVERY_MS = 500
_LAST_WORDS_S = 1.0
"""Longest wait for the remaining output of a server that has ended, in seconds."""
_TAIL_LINES = 15
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send, of which the log of a server says nothing."""
_POLL_S = 0.1
_ANSWER_S = 5.0
"""Longest wait for a sign of life, in seconds."""
_GROUP_ENDS_S = 30.0
"""Longest wait for processes after SIGKILL, which releasing GPU memory may delay, in seconds."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Values of an attention head with which vLLM computes on CPU."""
_CPU_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's cache on CPU, the fewest that its kernels take. Requests share whole
blocks of their prompts, so with vLLM's own 128 a group shares nothing of a shorter prompt."""
"""Seconds between two health checks while the server starts."""
_TOKEN_PLANE = "telescope_train.inference.vllm_plugin.token_plane.TokenPlane"
_IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor on CPU, which computes in the engine's own process. vLLM's default on CPU is another
process, which spins while it waits (40 % of its time, taken from the trainer's core). The executor
is given by its import path, because vLLM replaces the short name `uni` with that default."""
_IN_PROCESSES = "telescope_train.inference.vllm_plugin.executor.EveryAnswer"
_QUANTIZED = {"fp8": "fp8_per_block"}
"""vLLM's names. A scale for each block of 128 x 128 keeps a large value from coarsening all others,
as one scale for a whole matrix would."""
ACTIVITIES = (
    ("Resolved architecture", "starting its engine"),
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "warming up"),
    ("for vLLM's torch.compile", "compiling"),
    ("torch.compile took", "measuring its memory"),
    ("Capturing CUDA graphs", "capturing graphs"),
    ("init engine (profile", "opening its address"),
)
"""Text of vLLM's output, and what the server does from then on."""
_SAME_NAME = (
    *("deepseek_v32", "gemma4", "gigachat3", "glm45", "granite-20b-fc", "hermes", "internlm"),
    *("kimi_k2", "kimi_k3", "lfm2", "llama3_json", "llama4_json", "minicpm5", "minimax_m2"),
    *("mistral", "phi4_mini_json", "pythonic", "qwen3_coder", "seed_oss", "xlam"),
)
"""Parsers that have the same name in vLLM."""
_NAME_THERE = {**{name: name for name in _SAME_NAME}, "harmony": "openai"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Content and address of one server."""

    model_path: str
    """Folder of a Hugging Face model, or its id on the Hugging Face Hub."""
    host: str = LOOPBACK
    """Address on which it listens."""
    reached_at: str | None = None
    """Address for others to reach it; None = `host`."""
    port: int = 0
    """0 = a free one, which is set for its process."""
    secret: str = field(default="", repr=False)
    """Secret that every request must show, on every path; empty = none."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional environment variables, those of its node."""
    log_path: Path
    """File for the output of the server; a name with `.jsonl` gives it the form of other logs."""
    number: int = 0
    """Its number among the run's servers, for its log."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    num_threads: int = 1
    """Number of CPU threads for computing; has no effect on a GPU."""
    tensor_parallel_size: int = 1
    """Number of GPUs, or processes on CPU, that compute one model together."""
    data_parallel_size: int = 1
    """Number of copies of the model, which share the requests."""
    dtype: str = "float32"
    """vLLM's name of the type that the model computes in, such as `bfloat16` or `auto`."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None = the model's own limit."""
    max_num_seqs: int = 256
    """Requests that are processed at once."""
    scheduling_policy: str = "priority"
    """vLLM's name of the order of requests that wait: `priority` or `fcfs`."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that vLLM may use, from 0 to 1; has no meaning on CPU."""
    sleeps: bool = False
    """Whether it can free the memory of its GPU for a while."""
    takes_weights: bool = False
    """Whether a trainer will send it weights."""
    trust_remote_code: bool = False
    chat_template: Path | None = None
    """File with the replacement of the model's chat template; None = its own."""
    fp32_lm_head: bool = False
    """Compute logits in float32 whatever the `dtype`."""
    quantization: str = "none"
    """Type to which it rounds the matrices of layers as they arrive: `none` or `fp8`."""
    traces_endpoint: str | None = None
    """Address to which the server sends its traces, as OTLP with protobuf over HTTP; None =
    none."""
    run: str = ""
    """Name of the run, for its traces."""
    traces_secret: str = field(default="", repr=False)
    """Secret for that address; empty = none."""
    returns_routes: bool = False
    """Whether it reports the experts of each token; needs a GPU and a mixture of experts."""
    adapter: ServedAdapter | None = None
    """The adapter that the trainer will send; None = weights change, or nothing does."""
    more_arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's command line."""

    @property
    def base_url(self) -> str:
        """Root of the server, without a trailing slash; names itself before it has an address."""
        host = self.reached_at or self.host or f"server-{self.number}-not-placed"
        return f"http://{in_url(host)}:{self.port}"

    @property
    def num_processes(self) -> int:
        """Number of processes that compute, each on its own GPU if there are GPUs."""
        return self.tensor_parallel_size * self.data_parallel_size

    def arguments(self) -> list[str]:
        """Return the command line."""
        # `--generation-config vllm` ignores the sampling defaults in the model's own files: a top_p
        # from there would apply to every request that does not name one.
        arguments = [
            *(sys.executable, "-m", "telescope_train.inference.vllm_plugin.main"),
            *("--model", self.model_path, "--served-model-name", SERVED_MODEL_NAME),
            *("--host", self.host, "--port", str(self.port), "--dtype", self.dtype),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--enable-scale-out", "--disable-uvicorn-access-log"),
            *("--middleware", _TOKEN_PLANE, "--scheduling-policy", self.scheduling_policy),
        ]
        if self.fp32_lm_head and self.dtype != "float32":
            arguments += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
        if self.quantization != "none":
            arguments += ["--quantization", _QUANTIZED[self.quantization]]
        if self.chat_template is not None:
            arguments += ["--chat-template", str(self.chat_template)]
        if self.max_model_len is not None:
            arguments += ["--max-model-len", str(self.max_model_len)]
        arguments += self._engine_arguments()
        if self.sleeps:
            arguments.append("--enable-sleep-mode")
        if self.takes_weights:
            arguments += [
                *(
                    "--worker-extension-cls",
                    "telescope_train.weights.vllm_extension.WorkerExtension",
                ),
                *("--weight-transfer-config", json.dumps({"backend": WEIGHT_ENGINE})),
            ]
        if self.traces_endpoint is not None:
            arguments += ["--otlp-traces-endpoint", self.traces_endpoint]
        if self.adapter is not None:
            arguments += self.adapter.arguments()
        if self.trust_remote_code:
            arguments.append("--trust-remote-code")
        return [*arguments, *self.more_arguments]

    def _engine_arguments(self) -> list[str]:
        """Return the arguments for the number of engines and their devices."""
        arguments = ["--enable-return-routed-experts"] if self.returns_routes else []
        if self.num_processes > 1:
            arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
            arguments += ["--data-parallel-size", str(self.data_parallel_size)]
        if self.tensor_parallel_size > 1:
            arguments += ["--distributed-executor-backend", _IN_PROCESSES]
        if self.device != "cpu":
            return [*arguments, "--gpu-memory-utilization", str(self.gpu_memory_utilization)]
        if self.tensor_parallel_size == 1:
            arguments += ["--distributed-executor-backend", _IN_ENGINE]
        arguments += ["--enforce-eager", "--block-size", str(_CPU_BLOCK_TOKENS)]
        # Scheduling ahead keeps a GPU busy. Here the CPU both schedules and computes.
        return [*arguments, "--no-async-scheduling"]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the server's process."""
        environment = {
            **os.environ,
            **reached_directly(os.environ),
            **self.variables,
            SECRET_VARIABLE: self.secret,
            # torch reads its own files in the encoding of the locale, and they are UTF-8.
            "PYTHONUTF8": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # vLLM serves `/resume` and the routes of weight updates only in this mode.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        # Of a server that the user starts. This one asks for its own secret, which nobody types.
        environment.pop("VLLM_API_KEY", None)
        if self.returns_routes:
            # Only this one of vLLM's model runners has them.
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.traces_endpoint is not None:
            environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
            environment.setdefault("OTEL_SERVICE_NAME", SERVER_SERVICE)
            own = (f"{SERVER_ATTRIBUTE}={self.base_url}", f"{RUN_ATTRIBUTE}={quote(self.run)}")
            # Attributes of the user stay; of two with one name, the last one counts.
            given = environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
            environment["OTEL_RESOURCE_ATTRIBUTES"] = ",".join(filter(None, (given, *own)))
            environment["OTEL_BSP_SCHEDULE_DELAY"] = str(_TRACES_EVERY_MS)
            if self.traces_secret:
                shown = quote(f"Bearer {self.traces_secret}")
                environment["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization={shown}"
        if self.device == "cpu":
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            environment["OMP_NUM_THREADS"] = str(self.num_threads)
            # By default, threads that wait for each other spin, on cores the trainer also uses.
            environment.setdefault("OMP_WAIT_POLICY", "passive")
            # vLLM would bind its threads to cores. The trainer uses the same cores, so the
            # operating system places the threads better.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            if self.num_processes > 1:
                # An engine in the API server's process is the only one there can be, and its
                # kernels are registered in that process alone.
                environment[ENGINE_THREAD_VARIABLE] = "0"
            environment.setdefault(ENGINE_THREAD_VARIABLE, "1")
            environment.setdefault(CPU_KERNELS_VARIABLE, "1")
            # With enforce-eager, only one helper of the sampler is still compiled. That costs the
            # first request 20 s of C++ compilation and gains nothing measurable.
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        return environment


class StartActivity:
    """What a server that starts is doing, according to the lines of its output."""

    def __init__(self) -> None:
        self.now = "importing its libraries"

    def hear(self, line: str) -> None:
        """Read one line."""
        for text, activity in ACTIVITIES:
            if text in line:
                self.now = activity


class Silence:
    """The time without output of a server that starts.

    A starting server logs its progress: it downloads, loads each file, compiles, captures graphs. A
    large model may take any time for that, while a server that hangs falls silent.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._log_bytes = -1
        self._spoke_s = time.monotonic()

    def is_too_long(self, log_bytes: int) -> bool:
        """Return whether its log has not grown for longer than the limit."""
        if log_bytes != self._log_bytes:
            self._log_bytes, self._spoke_s = log_bytes, time.monotonic()
        return time.monotonic() - self._spoke_s > self._limit_s


class ServerProcess:
    """A running server. `close` ends it and all processes it started."""

    def __init__(self, settings: ServerSettings, listener: socket.socket | None = None) -> None:
        """`listener`: socket of the server, owned by this object; None = as the settings say.

        Raises ConfigError when it cannot listen there.
        """
        if listener is None:
            try:
                listener = listening(settings.host, settings.port)
            except OSError as error:
                raise cannot_listen(settings.host, settings.port, error) from None
        with listener:
            self.settings = replace(settings, port=listener.getsockname()[1])
            self._start(listener.fileno())

    def _start(self, descriptor: int) -> None:
        """Start the process, which inherits the socket `descriptor`."""
        settings = self.settings
        settings.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.identity = secrets.token_hex(8)
        """Identity of this start of the server, which no other one has."""
        self._was_healthy = False
        self._asking: HTTPConnection | None = None
        """The health check that is waiting for its answer."""
        self._cause, self._activity = DeathCause(), StartActivity()
        self._output = OutputLog(
            settings.log_path,
            hear=self._hear,
            component=INFERENCE,
            source=str(settings.number),
            hide={
                *secret_values(os.environ),
                *filter(None, [settings.secret, settings.traces_secret]),
            },
        )
        self._scratch = ScratchFolder(SCRATCH_PREFIX, max_parent_bytes=MAX_TEMP_PATH)
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        # With a session of its own, `close` can end the whole group, and Ctrl-C in a terminal does
        # not reach the server: the driver receives it and ends its processes in order.
        try:
            self._process = subprocess.Popen(
                settings.arguments(),
                env={
                    # By default torch keeps what it has compiled among the temporary files.
                    "TORCHINDUCTOR_CACHE_DIR": compiled,
                    **settings.environment(),
                    # vLLM leaves a file at each start, and sockets when it is killed.
                    "TMPDIR": str(self._scratch.path),
                    IDENTITY_VARIABLE: self.identity,
                    SOCKET_VARIABLE: str(descriptor),
                },
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._output.fd,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._output.close()
            self._scratch.remove()
            raise
        self._output.begin()
        self._watchdog: Watchdog | None = Watchdog([self._process.pid])

    @property
    def root(self) -> str:
        """Prefix of all URLs of this start of the server, which no other one answers."""
        return root_of(self.settings.base_url, self.identity)

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return self._process.pid

    def check(self) -> None:
        """Raise ProcessDiedError if the process has ended."""
        code = self._process.poll()
        if code is not None:
            what = f"inference server at {self.settings.base_url} (pid {self.pid}) died"
            raise self._died(
                f"{what} {_describe_exit(code)}",
                has_ended_itself=code >= 0,
                tells_why=-code not in _FROM_OUTSIDE,
            )

    def check_engine(self) -> bool:
        """Return whether the engine of a running server shows a sign of life within 5 s.

        Raises ProcessDiedError if its engine is gone: it answers 503, or has stopped listening
        while it waits for requests that its dead engine will never answer.
        """
        # A server that starts has a socket and no engine that could answer.
        if not self._was_healthy:
            return True
        connection = self._connection()
        try:
            # Not `/health`, which a server answers as well when its engine hangs.
            self._ask(connection, ENGINE_PATH)
            status = connection.getresponse().status
        except ConnectionRefusedError:
            status = HTTPStatus.SERVICE_UNAVAILABLE
        except (OSError, HTTPException):
            # A timeout or a reset. Between two steps the engine may take a while, for example for
            # new weights, so one late answer proves nothing.
            return False
        finally:
            connection.close()
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            what = f"the engine of the inference server at {self.settings.base_url}"
            raise self._died(f"{what} (pid {self.pid}) died", has_ended_itself=True)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED, OTHER_SERVER_STATUS):
            raise ProcessDiedError(
                f"another program answers at {self.settings.base_url}, the address of the "
                f"inference server {self.identity} (pid {self.pid}), which has left it"
                f"{holder_of(self.settings.port)}"
            )
        return status == HTTPStatus.OK

    def is_healthy(self) -> bool:
        """Whether the server answers its health check; raises ProcessDiedError if it has ended."""
        # Without this, waiting for a server that failed to start would last the whole deadline.
        self.check()
        # The socket takes connections before the server does, so one question waits for it.
        try:
            if self._asking is None:
                self._asking = self._connection()
                self._ask(self._asking, "/health")
            answers = select.poll()
            answers.register(self._asking.sock, select.POLLIN)
            if not answers.poll(0):
                return False
            self._was_healthy = self._asking.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            self._was_healthy = False
        self._asking.close()
        self._asking = None
        return self._was_healthy

    def _connection(self) -> HTTPConnection:
        # It knows no proxies, unlike urllib.
        host = self.settings.reached_at or self.settings.host
        return HTTPConnection(host, self.settings.port, timeout=_ANSWER_S)

    def _ask(self, connection: HTTPConnection, path: str) -> None:
        url = root_of("", self.identity) + path
        connection.request("GET", url, headers=secret_headers(self.settings.secret))

    @property
    def activity(self) -> str:
        """What it does before it answers."""
        return self._activity.now

    def log_bytes(self) -> int:
        """Return the number of bytes of its output."""
        return self._output.num_bytes

    def _hear(self, line: str) -> None:
        self._cause.hear(line)
        self._activity.hear(line)

    def _died(
        self, what: str, *, has_ended_itself: bool, tells_why: bool = True
    ) -> ServerDiedError:
        """Return an error that says `what` happened, with the log's first error, or its end.

        `tells_why`: whether the end of the log can have to do with it.
        """
        self._output.drain(_LAST_WORDS_S)
        cause = escaped(self._cause.found(has_ended_itself=has_ended_itself))
        log = f"its log is {self.settings.log_path}"
        end = self._output.tail(_TAIL_LINES) or "(it printed nothing)"
        shown = f"{log}, which ends:\n{end}" if tells_why else log
        why = f" of {cause}; {log}" if cause else f"; {shown}"
        error = ServerDiedError(f"{what}{why}")
        error.cause = cause
        return error

    def wait_until_healthy(
        self,
        deadline_s: float = STARTUP_DEADLINE_S,
        *,
        tell: Callable[[str], None] = lambda activity: None,
    ) -> None:
        """Return once it answers; `tell` is told again and again what it is doing.

        Raises ProcessDiedError if it ends, or prints nothing for `deadline_s` seconds.
        """
        silence = Silence(deadline_s)
        while not self.is_healthy():
            if silence.is_too_long(self.log_bytes()):
                raise ProcessDiedError(
                    f"inference server at {self.settings.base_url} did not answer its health "
                    f"check, and printed nothing for {deadline_s:g} s; its log is "
                    f"{self.settings.log_path}"
                )
            tell(self.activity)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the server and its children. Idempotent."""
        if self._watchdog is None:
            return  # another group may have its number by now
        if self._process.poll() is None:
            _signal_group(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # the SIGKILL below ends it then
                self._process.wait(timeout=5.0)
        # In any case: a GPU server's engine is a process of its own and may outlive the leader,
        # and then its memory would be missing for the next run.
        _signal_group(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)
        _until_group_ended(self.pid)
        if self._asking is not None:
            self._asking.close()
        # Only now: had this process died before it sent SIGKILL, the watchdog would have had to.
        self._watchdog.end()
        self._watchdog = None
        self._output.close()
        self._scratch.remove()


@contextmanager
def running(
    settings: ServerSettings,
    *,
    deadline_s: float = STARTUP_DEADLINE_S,
    tell: Callable[[str], None] = lambda activity: None,
) -> Iterator[ServerProcess]:
    """Run a server until the context ends; it is healthy when the context begins.

    Before that, `tell` is told again and again what the server is doing. Errors caused by the
    server's death are raised as its death.
    """
    server: ServerProcess | None = None
    try:
        # A signal between its start and the watchdog's would leave a server that nobody ends.
        with interrupts.held():
            server = ServerProcess(settings)
        interrupts.raise_if_asked()
        server.wait_until_healthy(deadline_s, tell=tell)
        yield server
    except TelescopeError:
        if server is not None:
            server.check()
            server.check_engine()
        raise
    finally:
        if server is not None:
            with interrupts.held():
                server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    """Address with `/v1` at the end, which no other server answers."""
    model: str
    """Name of the model in requests."""
    api_key: str = field(repr=False)
    """Key that requests must show."""


@contextmanager
def serve_model(
    model_path: str,
    *,
    log_path: Path,
    chat_template: Path | None = None,
    tell: Callable[[str], None] = lambda activity: None,
) -> Iterator[ServedModel]:
    """Serve `model_path` on a free port until the context ends.

    `chat_template`: a file; None = the model's own template. `tell` is told what the server is
    doing as it starts. Raises ProcessDiedError at the end if the server has died meanwhile.
    """
    device = machine_device()
    template = template_in(Path(model_path)) if chat_template is None else chat_template.read_text()
    settings = ServerSettings(
        model_path=model_path,
        more_arguments=tool_call_arguments(template or ""),
        secret=secrets.token_urlsafe(32),
        log_path=log_path,
        device=device,
        num_threads=max(1, usable_cores() - 1),
        dtype="float32" if device == "cpu" else "auto",
        chat_template=chat_template,
    )
    with running(settings, tell=tell) as server:
        url = f"{server.root}/v1"
        yield ServedModel(base_url=url, model=SERVED_MODEL_NAME, api_key=settings.secret)
        # Requests that failed for it may have been recorded, and not raised.
        server.check()
        server.check_engine()


def _describe_exit(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"of signal {signal.Signals(-code).name}"


def _signal_group(pid: int, signal_number: int) -> None:
    with suppress(ProcessLookupError):  # every member has ended
        os.killpg(pid, signal_number)


def _until_group_ended(group: int) -> None:
    """Return when all processes of a killed group have ended; after a limit in any case."""
    # The engine of a GPU holds memory, and may hold the port, until the system has taken it down.
    end_s = time.monotonic() + _GROUP_ENDS_S
    while any(_is_running(pid, group) for pid in psutil.pids()):
        if time.monotonic() > end_s:
            return
        time.sleep(_POLL_S)


def _is_running(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False


def tool_call_arguments(template: str) -> tuple[str, ...]:
    """Return vLLM's arguments that let a model with `template` be offered tools.

    vLLM refuses every request with tools unless it was told how the model writes calls, and evals
    of a model folder ask for calls; runs read them themselves, from tokens (`chat.formats`).
    Nothing for a template that shows no tools, or whose calls vLLM has no reader for: then it
    refuses requests with tools, rather than to leave them out.
    """
    name = _NAME_THERE.get(choose_format(template).tool_calls.name)
    if name is None or "tools" not in template:
        return ()
    return ("--enable-auto-tool-choice", "--tool-call-parser", name)
