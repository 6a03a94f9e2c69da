"""Addresses of a run's own processes: their written form, and how to bypass proxies for them.

Proxies in environment variables are for addresses elsewhere. A request to a process of this run
would fail through one: the process is on this machine, or on a node that the proxy cannot reach.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_VARIABLES = ("no_proxy", "NO_PROXY")
"""Both spellings, because programs differ: gRPC reads the first, some Go and Java programs the
second."""


def in_url(host: str) -> str:
    """Return `host` as it is written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def without_brackets(host: str) -> str:
    """Return `host` as a socket takes it: an IPv6 address without the brackets of a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Return whether only processes of the same machine reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_this_machine(url: str) -> bool:
    """Return whether only processes of the same machine reach the host of `url`."""
    return is_loopback(urlsplit(url).hostname or "")


def reached_directly(environ: Mapping[str, str], hosts: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment variables that make programs bypass proxies for loopback and `hosts`.

    Hosts that `environ` already excepts stay excepted, in either spelling of the variable.
    """
    given = [one.strip() for name in _VARIABLES for one in environ.get(name, "").split(",")]
    excepted = dict.fromkeys([*filter(None, given), *LOOPBACK_HOSTS, *hosts])
    return dict.fromkeys(_VARIABLES, "*" if "*" in excepted else ",".join(excepted))
