"""`telescope hub serve`, and what is changed in a served registry: its owners and short names."""

import json
import logging
import re
import shlex
import sys
from importlib.util import find_spec
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.verbs import Verb, verb_app
from telescope_core.base.addresses import is_loopback, without_brackets
from telescope_core.base.errors import ConfigError
from telescope_core.base.open_files import raise_limit
from telescope_envs.registry.config import parse_address
from telescope_envs.server.hub import opened_hub, publishers_text

_PUBLISHER = re.compile(
    r"(?P<kind>repository|user|key):(?P<id>.+?)(,workflow=(?P<workflow>[^,]+))?"
    r"(,issuer=(?P<issuer>[^,]+))?"
)

DataOption = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="Data folder of telescope hub serve.")
]
OwnerArgument = Annotated[str, typer.Argument(help="The owner.")]
ReasonOption = Annotated[str, typer.Option(help="One line for the log: telescope hub audit.")]
_PUBLISHER_FORM = "KIND:ID[,workflow=FILE][,issuer=URL]"
_PUBLISHER_HELP = (
    "Who publishes under the owner; KIND is repository, user or key. Only attestations of its "
    "repositories count, only of the workflow if one is given; repeatable."
)

namespace_app = verb_app(
    {
        "add": Verb(".hub.serve:add_namespace", "Add an owner."),
        "publishers": Verb(".hub.serve:change_publishers", "Replace the publishers of an owner."),
        "list": Verb(".hub.serve:list_namespaces", "List the owners."),
        "suspend": Verb(
            ".hub.serve:suspend", "Let an owner publish nothing, and refuse its tokens."
        ),
        "restore": Verb(".hub.serve:restore", "Take a suspension back."),
    },
    "Add, list, change, suspend and restore the owners of a served registry.",
    epilog="""Examples:

  telescope hub namespace add acme --data hub-data

  telescope hub namespace suspend acme --reason "stolen token" --data hub-data""",
)
alias_app = verb_app(
    {"add": Verb(".hub.serve:add_alias", "Give an environment a short name.")},
    "Give environments of a served registry a short name.",
    epilog="""Examples:

  telescope hub alias add toy acme/toy --data hub-data""",
)


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
    raise_limit()
    from telescope_envs.server.app import ServerOptions
    from telescope_envs.server.connections import ConnectionLimits
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
    if "@" in public_address.partition("//")[2].partition("/")[0]:
        raise ConfigError(
            "--public-address must hold no user and no password, because its pages show it to "
            "everybody; write https://HOST/PATH"
        )
    public = parse_address(public_address) if public_address else None
    if public is not None and public.scheme not in ("http", "https"):
        raise ConfigError(f"--public-address {public_address!r} must be written https://HOST/PATH")
    with opened_hub(data, must_exist=False) as hub:
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


def add_namespace(
    owner: Annotated[str, typer.Argument(help="The owner: the part before the / in owner/name.")],
    data: DataOption,
    publisher: Annotated[
        list[str] | None, typer.Option(metavar=_PUBLISHER_FORM, help=_PUBLISHER_HELP)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add an owner, so that you can create tokens that may publish under it.

    Example: telescope hub namespace add acme --data hub-data
    """
    publishers = [_publisher(text) for text in publisher or []]
    with opened_hub(data, must_exist=False) as hub:
        hub.add_namespace(owner, publishers)
    create = shlex.join(["--namespace", owner, "--data", str(data)])
    added = f"{owner}: added; next: telescope hub token create LABEL {create}"
    typer.echo(json.dumps({"owner": owner, "publishers": publishers}) if as_json else added)


def change_publishers(
    owner: OwnerArgument,
    publisher: Annotated[list[str], typer.Option(metavar=_PUBLISHER_FORM, help=_PUBLISHER_HELP)],
    reason: ReasonOption,
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Replace the publishers of an owner by those given.

    Example: telescope hub namespace publishers acme --publisher repository:acme/envs --reason moved
    --data hub-data
    """
    publishers = [_publisher(text) for text in publisher]
    with opened_hub(data) as hub:
        hub.change_publishers(owner, publishers, reason=reason)
    changed = f"{owner}: published by {publishers_text(publishers)}"
    typer.echo(json.dumps({"owner": owner, "publishers": publishers}) if as_json else changed)


def list_namespaces(data: DataOption, as_json: JsonOption = False) -> None:
    """List the owners.

    Example: telescope hub namespace list --data hub-data
    """
    with opened_hub(data, is_read_only=True) as hub:
        rows = hub.namespaces()
    if as_json:
        typer.echo(json.dumps([{"owner": owner, "status": status} for owner, status in rows]))
        return
    for owner, status in rows:
        typer.echo(owner if status == "active" else f"{owner}  {status}")


def suspend(
    owner: OwnerArgument,
    reason: ReasonOption,
    data: DataOption,
    withhold: Annotated[
        bool, typer.Option("--withhold", help="Serve nothing of what it published, either.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Let an owner publish nothing, and refuse its tokens, from the next request on.

    Its published releases stay installable, unless they are withheld.

    Example: telescope hub namespace suspend acme --reason "stolen token" --data hub-data
    """
    with opened_hub(data) as hub:
        hub.suspend(owner, reason=reason, is_withheld=withhold)
    _tell_status(owner, "withheld" if withhold else "suspended", as_json=as_json)


def restore(
    owner: OwnerArgument,
    reason: ReasonOption,
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Take the suspension of an owner back: it can publish again, and its tokens are valid.

    Example: telescope hub namespace restore acme --reason "new tokens" --data hub-data
    """
    with opened_hub(data) as hub:
        hub.restore(owner, reason=reason)
    _tell_status(owner, "active", as_json=as_json)


def _tell_status(owner: str, status: str, *, as_json: bool) -> None:
    row = {"owner": owner, "status": status}
    typer.echo(json.dumps(row) if as_json else f"{owner}: {status}")


def _publisher(text: str) -> dict[str, str]:
    found = _PUBLISHER.fullmatch(text)
    publisher = {key: part for key, part in found.groupdict().items() if part} if found else {}
    is_repository = publisher.get("kind") == "repository"
    if not publisher or ("," in publisher["id"] if is_repository else len(publisher) > 2):
        raise ConfigError(
            f"publisher {text!r} must be written {_PUBLISHER_FORM}, where KIND is repository, user "
            "or key, and only a repository has a workflow and an issuer"
        )
    return publisher


def add_alias(
    name: Annotated[str, typer.Argument(help="The short name.")],
    environment: Annotated[str, typer.Argument(help="The environment, owner/name.")],
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Give an environment a short name, permanently: it can never be given to another one.

    Example: telescope hub alias add toy acme/toy --data hub-data
    """
    with opened_hub(data) as hub:
        hub.add_alias(name, environment)
    typer.echo(json.dumps({name: environment}) if as_json else f"{name}: {environment}")


def audit(data: DataOption, as_json: JsonOption = False) -> None:
    """List who changed what in a served registry, the oldest change first.

    A change without a token was made on the server's machine.

    Example: telescope hub audit --data hub-data
    """
    with opened_hub(data, is_read_only=True) as hub:
        entries = hub.audit()
    if as_json:
        typer.echo(json.dumps([entry._asdict() for entry in entries]))
        return
    for entry in entries:
        token = f"  by token {entry.token}" if entry.token else ""
        reason = f"  ({entry.reason})" if entry.reason else ""
        typer.echo(f"{entry.at}  {entry.event}  {entry.subject}{token}{reason}")
