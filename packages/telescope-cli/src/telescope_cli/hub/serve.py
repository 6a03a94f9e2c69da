"""`telescope hub serve`."""

import json
import logging
import sys
from importlib.util import find_spec
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_core.base.addresses import is_loopback, without_brackets
from telescope_core.base.errors import ConfigError
from telescope_envs.registry.config import parse_address


def serve(
    data: DataOption,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for a free port.", min=0, max=65535)
    ] = 8470,
    public_address: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address at which people reach it, if a proxy or another name stands before it.",
        ),
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="Require a token for reading, too.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the registry; stored in its data folder.")
    ] = None,
    max_wheel_mb: Annotated[
        int, typer.Option(help="Largest accepted wheel, in MiB.", min=1, max=100)
    ] = 50,
    reads_per_minute: Annotated[
        int, typer.Option(help="Limit of requests per client address; 0 for no limit.", min=0)
    ] = 6000,
    publishes_per_hour: Annotated[
        int, typer.Option(help="Limit of publications per token; 0 for no limit.", min=0)
    ] = 120,
    connections_per_address: Annotated[
        int, typer.Option(help="Limit of open connections per client address.", min=1)
    ] = 64,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Believe X-Forwarded-For and -Proto from this address or network; repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a registry: its files, a simple index for pip and uv, and publishing.

    The data folder is created if it does not exist. The server stops on Ctrl-C and SIGTERM. Put a
    proxy with TLS in front of it if other machines can reach it.

    Example: telescope hub serve --data hub-data --port 8470
    """
    _require_packages()
    from telescope_envs.server.app import ServerOptions
    from telescope_envs.server.connections import ConnectionLimits
    from telescope_envs.server.hub import HubStore
    from telescope_envs.server.run import serve as serve_hub

    def started(address: str) -> None:
        line = {"address": address, "data": str(data), "private": private}
        typer.echo(json.dumps(line) if as_json else f"serving {data} at {address}")
        sys.stdout.flush()
        if warning := plain_http_warning(without_brackets(host), has_proxy=bool(proxies)):
            typer.echo(warning, err=True)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    proxies = tuple(map(_network, trust_proxy or ()))
    if proxies and not public_address:
        raise ConfigError(
            "--trust-proxy needs --public-address, the address at which the proxy is reached, such "
            "as https://hub.example.org"
        )
    public = parse_address(public_address) if public_address else None
    if public is not None and public.scheme not in ("http", "https"):
        raise ConfigError(f"--public-address {public_address!r} must be written https://HOST/PATH")
    hub = HubStore(data)
    try:
        if name is not None:
            hub.rename(name)
        options = ServerOptions(
            host=without_brackets(host),
            public_address=public.text if public is not None else "",
            is_private=private,
            max_wheel_bytes=max_wheel_mb * 1024 * 1024,
            reads_per_minute=reads_per_minute,
            publishes_per_hour=publishes_per_hour,
            connections=ConnectionLimits(per_address=connections_per_address),
            proxies=proxies,
        )
        serve_hub(hub, options, port=port, started=started)
    finally:
        hub.close()


def plain_http_warning(host: str, *, has_proxy: bool) -> str:
    """Return the warning for a server that other machines reach without a proxy."""
    if is_loopback(host) or has_proxy:
        return ""
    return (
        f"warning: with --host {host}, other machines reach this server over plain HTTP, where "
        "anyone on the way can read tokens and change wheels; put a proxy with TLS in front of it, "
        "and give --trust-proxy and --public-address"
    )


def _require_packages() -> None:
    missing = [
        package
        for package in ("fastapi", "uvicorn", "python_multipart")
        if find_spec(package) is None
    ]
    if missing:
        raise ConfigError(
            f"telescope hub serve needs {', '.join(missing)}; run: pip install "
            "'telescope-envs[serve]'"
        )


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"--trust-proxy {text!r} is not an address or a network ({error}); write for instance "
            "127.0.0.1 or 10.0.0.0/8"
        ) from None
