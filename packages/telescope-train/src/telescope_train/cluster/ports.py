"""TCP ports of this machine: reserve one, find a free one, and find who uses a taken one."""

import errno
import random
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import ConfigError
from telescope_train.config.fields import was_set
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.schema import TrainConfig

MOST_PORT = 65535
_BELOW_CONNECTIONS = (20_000, 32_000)
"""Linux uses ports from 32,768 on for connections, unless configured otherwise."""
_TRIES = 20
_COMMAND_CHARACTERS = 60


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `host`, so that nothing else can take its port.

    `port` 0 = a free one. Raises OSError.
    """
    # A port that is only bound could be bound once more by whoever sets SO_REUSEADDR, as vLLM does.
    # asyncio turns off Nagle's algorithm only if the protocol is given.
    listener = socket.socket(_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Without it, connections that have just ended hold the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def listening_from(host: str, first: int, *, every: int) -> socket.socket:
    """Return a socket at the first free port of `first`, `first + every` and so on.

    Other servers of the run on this machine start at other ports modulo `every`, so they never take
    the same port. Raises ConfigError if none is free.
    """
    for port in range(first, MOST_PORT + 1, every):
        try:
            return listening(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise cannot_listen(host, port, error) from None
    raise ConfigError(
        f"no port of {host} from {first} on is free on {socket.gethostname()}; set "
        "inference_base_port to a lower one"
    )


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error of a server that cannot listen, with the cause and settings to change."""
    place = f"{in_url(host)}:{port} of {socket.gethostname()}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"inference server: {place} is in use{holder_of(port)}; end that, or set "
            "inference_base_port to another port, or leave it out to take free ones"
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"inference server: cannot listen on {place} ({error.strerror}); set "
            "inference_base_port to 1024 or more"
        )
    kind = "IPv6 " if ":" in host else ""
    return ConfigError(
        f"inference server: this machine has no {kind}address {host!r} to listen on "
        f"({error.strerror or error}); set inference_host to an address that it has, or leave it "
        "out"
    )


def holder_of(port: int) -> str:
    """Return ` by process PID (its command)` for the listener on `port`; empty if not known."""
    # Processes of other users are not shown to everybody.
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                words = psutil.Process(one.pid).cmdline() or [""]
                command = " ".join([Path(words[0]).name, *words[1:]])[:_COMMAND_CHARACTERS]
                return f" by process {one.pid} ({command})"
    return ""


def port_problems(config: TrainConfig) -> list[str]:
    """Return a message for each address of the inference servers that cannot be listened on.

    Ports that were not set are skipped: a server takes a later one if its first choice is in use.
    """
    section = config.inference
    host = section.inference_host or LOOPBACK
    ports = [0]
    if was_set(section, "inference_base_port"):
        first = section.inference_base_port
        ports = list(range(first, first + section.inference_num_workers))
    problems: list[str] = []
    for port in ports:
        try:
            listening(host, port).close()
        except (OSError, OverflowError) as error:
            failed = error if isinstance(error, OSError) else OSError(str(error))
            problems.append(str(cannot_listen(host, port, failed)))
    return problems


def free_port(host: str = LOOPBACK) -> int:
    """Return a port of `host` without a listener, for a server that starts soon.

    It is below the range from which Linux picks ports for outgoing connections, so that none of
    these takes it before the server does. If every port tried there is in use, the system chooses
    one. If the socket itself can be handed over, use `listening`, which holds the port.
    """
    chance = random.SystemRandom()
    for port in (*(chance.randrange(*_BELOW_CONNECTIONS) for _ in range(_TRIES)), 0):
        # Without SO_REUSEADDR, so that whoever listens there later need not set it either.
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise ConfigError(
        f"no port of {host} is free on {socket.gethostname()}, or it has no such address; stop a "
        "program that listens there"
    )


class HeldPort:
    """A port that is reserved from its choice until its user listens on it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self, host: str = LOOPBACK) -> int:
        """Reserve a port of `host`, to which connections can be made from now on.

        One that was held before is let go.
        """
        self.close()
        self._socket = listening(host)
        return int(self._socket.getsockname()[1])

    def hand_over(self, port: int) -> int | None:
        """Return the descriptor of the listening socket, which the caller now owns.

        None when `port` is not the one that is held.
        """
        if self._socket is None or self._socket.getsockname()[1] != port:
            return None
        held, self._socket = self._socket, None
        return held.detach()

    def close(self) -> None:
        """Release the port. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
