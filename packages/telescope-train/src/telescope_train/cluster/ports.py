"""TCP ports of this machine: free ones, and those of a run that are already taken."""

import socket

from telescope_core.errors import ConfigError
from telescope_train.config.schema import TrainConfig


def port_problems(config: TrainConfig) -> list[str]:
    """Return a message for each port of the inference servers that is already taken."""
    section = config.inference
    problems: list[str] = []
    for port in range(
        section.inference_base_port,
        section.inference_base_port + section.inference_num_workers,
    ):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((section.inference_host, port))
            except OSError as error:
                problems.append(
                    f"inference server: cannot listen on {section.inference_host}:{port} "
                    f"({error.strerror or error}); stop the program that uses it, or set "
                    "inference_base_port"
                )
    return problems


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError when something already listens on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} is in use ({error.strerror}); stop the program that "
                "listens there, or set inference_base_port to another port"
            ) from None
