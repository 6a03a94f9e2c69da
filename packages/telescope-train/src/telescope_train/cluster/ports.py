"""TCP ports of this machine: free ones, and those of a run that are already taken."""

import errno
import random
import socket
from contextlib import suppress

from telescope_core.errors import ConfigError
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.schema import TrainConfig

MOST_PORT = 65535
_BELOW_CONNECTIONS = (20_000, 32_000)
"""Linux gives connections ports from 32,768 on, unless its administrator chose others."""
_TRIES = 20


def port_problems(config: TrainConfig) -> list[str]:
    """Return a message for each port of the inference servers that is already taken."""
    section = config.inference
    host = section.inference_host or LOOPBACK
    problems: list[str] = []
    for port in range(
        section.inference_base_port,
        section.inference_base_port + section.inference_num_workers,
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problems.append(
                    f"inference server: cannot listen on {host}:{port} "
                    f"({error.strerror or error}); stop the program that uses it, or set "
                    "inference_base_port"
                )
    return problems


def free_port(host: str = LOOPBACK) -> int:
    """Return a port of `host` on which nothing listens now, for a server that starts soon.

    It is below the ports that Linux gives to connections by itself, so that none of them takes it
    before the server does. When every port that was tried there is in use, it is one that the
    system chooses.
    """
    chance = random.SystemRandom()
    for port in (*(chance.randrange(*_BELOW_CONNECTIONS) for _ in range(_TRIES)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise ConfigError(
        f"no port of {host} is free on {socket.gethostname()}, or it has no such address; stop a "
        "program that listens there"
    )


class HeldPort:
    """A port that nothing else can take between the moment it is told and the first listener."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self, host: str = LOOPBACK) -> int:
        """Return a port of `host` that connections reach from now on.

        One that was held before is let go.
        """
        self.close()
        self._socket = socket.create_server((host, 0))
        return int(self._socket.getsockname()[1])

    def hand_over(self, port: int) -> int | None:
        """Return the descriptor of the listening socket, which the caller owns from now on.

        None when `port` is not the one that is held.
        """
        if self._socket is None or self._socket.getsockname()[1] != port:
            return None
        held, self._socket = self._socket, None
        return held.detach()

    def close(self) -> None:
        """Let the port go. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def first_free_port(host: str, first: int, *, every: int) -> int:
    """Return the first port of `first`, `first + every` and so on that is free on `host`.

    Servers of a run on the same machine have other remainders, so none takes another one's. Raises
    ConfigError if there is none.
    """
    for port in range(first, MOST_PORT + 1, every):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"cannot listen on {host} of {socket.gethostname()}: {error.strerror}; set "
                        "inference_host to an address that this machine has, or leave it out"
                    ) from None
                continue
            return port
    raise ConfigError(
        f"no port of {host} from {first} on is free on {socket.gethostname()}; set "
        "inference_base_port to a lower one"
    )


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError when something already listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} of {socket.gethostname()} is in use ({error.strerror}); "
                "stop the program that listens there, or set inference_base_port to another port"
            ) from None
