"""Let programs of a sandbox that has no network reach some hosts, through a proxy in this process.

The sandbox has one address opened to it, that of the proxy, and programs find it by the variables
that HTTP clients read. The proxy looks up names itself and connects to what it has checked, so
neither other addresses nor other answers of a name server can be reached.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from telescope_core.sandboxes.local.relay import CONNECT_S, Streams, forwarding

Address = IPv4Address | IPv6Address

EVERYWHERE = ("*",)
"""Entries that allow every public host."""
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_HEAD_BYTES = 64 << 10
_HEAD_S = 60.0
_OF_ONE_CONNECTION = {"connection", "host", "keep-alive", "proxy-authorization", "proxy-connection"}
"""Headers that a proxy does not pass on, or writes itself."""


def normalize_hosts(entries: Sequence[str]) -> tuple[str, ...]:
    """Return names, `*.` and a name, and ranges of addresses as `AllowedHosts` takes them.

    Raises ValueError for anything else, such as an entry with a port.
    """
    found: list[str] = []
    for entry in entries:
        host = entry.strip().lower().rstrip(".")
        try:
            found.append(str(ip_network(host)))
            continue
        except ValueError:
            name = host.removeprefix("*.")
        if not all(_LABEL.fullmatch(label) for label in name.split(".")):
            raise ValueError(
                "allowed_hosts must be names such as 'example.org' or '*.example.org', addresses, "
                f"or ranges such as '192.0.2.0/24', without ports and paths, got {entry!r}"
            )
        found.append(host)
    return tuple(found)


class AllowedHosts:
    """Says to which addresses a program may connect.

    Any port of them: entries have none.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """`entries` are those of `normalize_hosts`."""
        self.entries = tuple(entries)
        self._has_all = self.entries == EVERYWHERE
        self._networks = [ip_network(entry) for entry in entries if "/" in entry]

    def names(self, host: str) -> bool:
        """Return whether the name of a host is among the entries."""
        wildcards = [entry[1:] for entry in self.entries if entry.startswith("*.")]
        is_below = any(host.endswith(suffix) for suffix in wildcards)
        return self._has_all or host in self.entries or is_below

    def permits(self, address: Address, *, is_named: bool) -> bool:
        """Return whether an address may be connected to; `is_named`: it is that of an allowed name.

        A name leads to public addresses alone, so that whoever answers for it cannot choose one of
        this machine's network; such addresses count if the task names them. Never this machine's.
        """
        address = getattr(address, "ipv4_mapped", None) or address
        if self.is_of_this_machine(address) or address.is_multicast:
            return False
        is_listed = any(address in network for network in self._networks)
        return is_listed or ((is_named or self._has_all) and address.is_global)

    def is_of_this_machine(self, address: Address) -> bool:
        """Return whether an address is this machine's, or that of what gives it its settings."""
        return address.is_loopback or address.is_link_local or address.is_unspecified

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of a name; raises OSError where there are none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port)
        return [ip_address(one) for one in dict.fromkeys(entry[4][0] for entry in found)]

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Return the addresses to which a program that asked for `host` is connected.

        Raises PermissionError for a host that is not allowed, and OSError for a name that leads
        nowhere.
        """
        host = host.lower().rstrip(".")
        try:
            found, is_named = [ip_address(host)], False
        except ValueError:
            is_named = True
            found = await self.resolve(host, port) if self.names(host) else []
        permitted = [one for one in found if self.permits(one, is_named=is_named)]
        if not permitted:
            why = " leads to no public address" if found and is_named else " is not allowed"
            raise PermissionError(
                f"{host}{why}; the task allows {', '.join(self.entries) or 'no hosts'}"
            )
        return permitted


def proxy_variables(address: str) -> dict[str, str]:
    """Return the variables by which programs find a proxy at `address`, a host and a port."""
    url, direct = f"http://{address}", "localhost,127.0.0.1,::1"
    found = {"http_proxy": url, "https_proxy": url, "all_proxy": url, "no_proxy": direct}
    # Some programs read these, some those.
    return {**found, **{name.upper(): value for name, value in found.items()}}


@contextlib.asynccontextmanager
async def proxy_for(hosts: AllowedHosts) -> AsyncGenerator[int]:
    """Serve a proxy to `hosts` during a block; yields its port on the loopback."""
    reach = _Proxy(hosts).reach
    async with forwarding(reach, host="127.0.0.1", port=0, limit=_HEAD_BYTES) as server:
        yield int(server.sockets[0].getsockname()[1])


class _Proxy:
    """Answers what programs ask of a proxy."""

    def __init__(self, hosts: AllowedHosts) -> None:
        self._hosts = hosts

    async def reach(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Streams | None:
        """Return the streams to what a program asks for; None after it was answered why not."""
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            target, request = _asked(head.decode("latin-1"))
            reached = await self._connected(target)
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError, TimeoutError):
            writer.transport.abort()
        except ValueError as error:
            await _answer(writer, "400 Bad Request", str(error))
        except PermissionError as error:
            await _answer(writer, "403 Forbidden", str(error))
        except OSError as error:
            await _answer(writer, "502 Bad Gateway", str(error))
        else:
            if request:
                reached[1].write(request)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            return reached
        return None

    async def _connected(self, target: SplitResult) -> Streams:
        """Return the streams to what a program asked for; see `AllowedHosts.addresses`."""
        host, port = target.hostname, target.port or 80
        if not host:
            raise ValueError(f"expected a host, got {target.geturl()!r:.200}")
        async with asyncio.timeout(CONNECT_S):
            error: OSError | None = None
            for address in await self._hosts.addresses(host, port):
                try:
                    # The address, not the name, which could be another one by now.
                    return await asyncio.open_connection(str(address), port)
                except OSError as failed:
                    error = failed
        raise OSError(f"{host}:{port} cannot be reached: {error}")


def _asked(head: str) -> tuple[SplitResult, bytes]:
    """Return what a request is for, and the request to pass on; none for a tunnel.

    Raises ValueError for what is no request to a proxy.
    """
    first, *headers = head.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        raise ValueError(f"expected a request of HTTP/1.1, got {first!r:.200}")
    method, url, version = words
    if method == "CONNECT":
        target = urlsplit(f"//{url}")
        if target.port is None:
            raise ValueError(f"CONNECT needs HOST:PORT, got {url!r:.200}")
        return target, b""
    target = urlsplit(url)
    if target.scheme != "http":
        raise ValueError(f"expected CONNECT HOST:PORT or an address of http, got {url!r:.200}")
    path = target._replace(scheme="", netloc="", fragment="").geturl() or "/"
    kept = [one for one in headers if one.partition(":")[0].lower() not in _OF_ONE_CONNECTION]
    # The next request of the program may be for another host, and needs a connection of its own.
    host = target.netloc.rpartition("@")[2]
    lines = [f"{method} {path} {version}", f"Host: {host}", *kept, "Connection: close", "", ""]
    return target, "\r\n".join(lines).encode("latin-1")


async def _answer(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    with contextlib.suppress(OSError):
        await writer.drain()
    writer.close()
