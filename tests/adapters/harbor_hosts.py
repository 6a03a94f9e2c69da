"""A host that tasks of Harbor may reach, on the loopback, and a program that tries others."""

import asyncio
import contextlib
from ipaddress import ip_address

from telescope_adapters.allowed_hosts import AllowedHosts

HOST = "127.0.0.2"


class OnLoopback(AllowedHosts):
    """Names lead to the second address of the loopback, which alone may be connected to."""

    def permits(self, address, *, is_named):
        return is_named and str(address) == HOST

    async def resolve(self, host, port):
        return [ip_address(HOST)]


@contextlib.asynccontextmanager
async def web():
    """A server that answers with what it was asked; yields its port and the requests."""
    asked: list[str] = []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n1\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


TRIES = """
import json, os, socket, urllib.request

port = int(os.environ["PORT"])


def asked(host):
    try:
        return urllib.request.urlopen(f"http://{host}:{port}/", timeout=60).read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code


def tried(family, kind, act, *rest):
    try:
        with socket.socket(family, kind, *rest) as one:
            one.settimeout(5)
            act(one)
        return "reached"
    except OSError as error:
        return "failed"


INET, STREAM, DGRAM = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM
query = bytes.fromhex("000101000001000000000000016101620000010001")
packet = bytes(60)
found = {
    "allowed": asked("files.test"),
    "not allowed": asked("other.test"),
    "address": asked("127.0.0.2"),
    "direct": tried(INET, STREAM, lambda one: one.connect(("127.0.0.2", port))),
    "far": tried(INET, STREAM, lambda one: one.connect(("192.0.2.1", 80))),
    "names": tried(INET, DGRAM, lambda one: (one.sendto(query, ("192.0.2.1", 53)), one.recv(9))),
    "raw": tried(INET, socket.SOCK_RAW, lambda one: one.sendto(packet, ("192.0.2.1", 0)), 1),
    "frames": tried(socket.AF_PACKET, socket.SOCK_RAW, lambda one: one.bind(("eth0", 0))),
}
urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
try:
    found["without"] = asked("files.test")
except OSError:
    found["without"] = "failed"
print(json.dumps(found))
"""
TRIED = {
    "allowed": "1",
    "not allowed": 403,
    "address": 403,
    **dict.fromkeys(("direct", "far", "names", "raw", "frames", "without"), "failed"),
}
"""What the program prints, as JSON, where the name `files.test` alone is allowed."""
