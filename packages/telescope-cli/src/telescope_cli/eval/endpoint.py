"""Settings of `telescope eval` for an endpoint: the API key, and the sampling options."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import JsonValue, Sampling
from telescope_core.chat.client import ApiKey
from telescope_core.processes.settings import split_address

USUAL_VARIABLE = "TELESCOPE_API_KEY"


class Endpoint(NamedTuple):
    """The endpoint of an eval."""

    base_url: str
    model: str | None
    """Name of the model there; None = the only one."""
    api_key: ApiKey


def api_key(variable: str | None) -> ApiKey:
    """Return the key in the environment variable that was named, or else in the default one.

    Raises ConfigError when a variable was named and is not set: without its key, the endpoint
    would refuse every request.
    """
    value = os.environ.get(variable or USUAL_VARIABLE, "")
    if variable is not None and not value:
        raise ConfigError(
            f"--api-key-env {variable}: this environment variable is not set; export it before "
            "the command, or leave the option out for an endpoint without a key"
        )
    return ApiKey(value, variable or USUAL_VARIABLE)


def host_seen_by(addresses: Sequence[str]) -> str:
    """Return the address of this machine that the workers at `addresses` can reach.

    Programs of an environment that runs elsewhere send their requests to it.
    """
    if not addresses:
        return "127.0.0.1"
    found = socket.getaddrinfo(*split_address(addresses[0]), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # Nothing is sent: the operating system chooses the interface that leads there.
        probe.connect(address)
        return str(probe.getsockname()[0])


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings in the `options` of the command.

    Without a temperature, an endpoint uses its default. A model folder, which is served for this
    eval, gets 1, so that the model's own distribution is sampled.
    """
    extra = _object(options["extra_body"])
    # Sent even as 1, which differs from leaving it out where the endpoint has another default.
    for name in ("top_p", "reasoning_effort"):
        if options[name] is not None:
            if name in extra:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--extra-body and {option} both set {name}; give it once")
            extra[name] = options[name]
    is_folder = options["base_url"] is None
    temperature = options["temperature"]
    return Sampling(
        max_tokens=options["max_tokens"],
        temperature=1.0 if temperature is None and is_folder else temperature,
        seed=options["seed"],
        stop=tuple(options["stop"]),
        extra=extra,
    )


_OWN = {
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "temperature": "--temperature",
    "seed": "--seed",
    "stop": "--stop",
    "model": "--model",
}
_NOT_OURS = {
    "messages": "the environment writes the conversation",
    "tools": "the environment names its tools",
    "stream": "answers are recorded when they are complete",
    "n": "--rollouts asks several times",
}


def _object(text: str | None) -> dict[str, JsonValue]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"--extra-body must be a JSON object such as '{{\"top_k\": 20}}', got {text!r}"
        )
    for name in cast(dict[str, Any], fields):
        if name in _OWN:
            raise ConfigError(f"--extra-body: {name} has an option of its own, {_OWN[name]}")
        if name in _NOT_OURS:
            raise ConfigError(f"--extra-body: {name} cannot be given: {_NOT_OURS[name]}")
    return cast(dict[str, JsonValue], fields)
