"""Hosts that a task of Harbor allows: the rule, the proxy, and ways around it."""

import asyncio
import json
import ssl
from ipaddress import ip_address

import pytest
from tests.adapters.harbor_folders import DOCKERFILE, TABLE, write_task
from tests.adapters.harbor_hosts import HOST, TRIED, TRIES, OnLoopback, web
from tests.adapters.harbor_playing import opened, playing

from telescope_adapters.allowed_hosts import (
    EVERYWHERE,
    AllowedHosts,
    normalize_hosts,
    proxy_for,
)
from telescope_adapters.harbor import HarborEnvironment
from telescope_adapters.harbor_tasks import read_tasks
from telescope_core import RolloutStatus
from telescope_core.errors import EnvironmentLoadError


def test_entries_are_names_addresses_and_ranges():
    found = normalize_hosts(["Example.org.", "*.a.b", "192.0.2.7", "10.0.0.0/8", "2001:db8::1"])
    assert found == ("example.org", "*.a.b", "192.0.2.7/32", "10.0.0.0/8", "2001:db8::1/128")
    for odd in ("https://a.b", "a.b:443", "a.b/c", "a.*.b", "*", "", "10.0.0.1/8", "a..b", "a b"):
        with pytest.raises(ValueError, match="without ports and paths"):
            normalize_hosts([odd])


def test_addresses_are_those_of_the_entries():
    hosts = AllowedHosts(normalize_hosts(["a.b", "*.c.d", "10.1.0.0/16", "::1", "127.0.0.1"]))
    assert [hosts.names(name) for name in ("a.b", "x.a.b", "x.c.d", "c.d", "xc.d")] == [
        *(True, False, True, False, False)
    ]
    cases = [
        # The address, whether it is that of an allowed name, and whether it is connected to.
        ("8.8.8.8", True, True),
        ("8.8.8.8", False, False),
        ("10.1.2.3", False, True),
        ("10.1.2.3", True, True),
        ("10.2.0.1", True, False),
        ("192.168.1.1", True, False),
        ("127.0.0.1", False, False),
        ("127.0.0.1", True, False),
        ("::1", False, False),
        ("::ffff:127.0.0.1", True, False),
        ("::ffff:10.1.2.3", False, True),
        ("169.254.169.254", True, False),
        ("fe80::1", True, False),
        ("0.0.0.0", True, False),
        ("224.0.0.1", True, False),
    ]
    for address, is_named, wanted in cases:
        got = hosts.permits(ip_address(address), is_named=is_named)
        assert got is wanted, address
    every = AllowedHosts(EVERYWHERE)
    assert every.names("x.y")
    for address, wanted in (("8.8.8.8", True), ("10.1.2.3", False), ("127.0.0.1", False)):
        assert every.permits(ip_address(address), is_named=False) is wanted, address


async def test_a_name_that_leads_elsewhere_later_is_asked_about_each_time():
    class Rebound(AllowedHosts):
        answers = iter([["93.184.216.34", "127.0.0.1"], ["127.0.0.1"], ["10.0.0.1"]])

        async def resolve(self, host, port):
            return [ip_address(one) for one in next(self.answers)]

    hosts = Rebound(["a.b"])
    assert [str(one) for one in await hosts.addresses("A.b.", 80)] == ["93.184.216.34"]
    for _ in range(2):
        with pytest.raises(PermissionError, match="no public address"):
            await hosts.addresses("a.b", 80)
    with pytest.raises(PermissionError, match=r"b\.a is not allowed; the task allows a\.b"):
        await hosts.addresses("b.a", 80)


async def asked_of(port: int, request: str, *more: bytes) -> bytes:
    """All that a proxy answers to a request, and to `more` that is sent at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode() + b"".join(more))
    found = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return found


async def test_a_proxy_connects_to_allowed_hosts_alone():
    async with web() as (port, asked), proxy_for(OnLoopback(["files.test", "*.x.y"])) as proxy:
        url = f"http://me:secret@files.test:{port}/a?b=c"
        head = "Proxy-Authorization: x\r\nHost: other.test\r\nX-Own: 1\r\nConnection: keep-alive"
        got = await asked_of(proxy, f"GET {url} HTTP/1.1\r\n{head}\r\n\r\n")
        assert got.endswith(b"\r\n\r\n1\n")
        first, *lines = asked.pop().rstrip("\r\n").split("\r\n")
        assert first == "GET /a?b=c HTTP/1.1"
        assert lines == [f"Host: files.test:{port}", "X-Own: 1", "Connection: close"]
        tunnel = f"CONNECT a.x.y:{port} HTTP/1.1\r\n\r\n"
        got = await asked_of(proxy, tunnel, b"GET /t HTTP/1.1\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert asked.pop().startswith("GET /t ")
        for request, status in (
            (f"CONNECT other.test:{port}", b"403"),
            (f"CONNECT {HOST}:{port}", b"403"),
            (f"CONNECT [::ffff:{HOST}]:{port}", b"403"),
            (f"GET http://files.test@other.test:{port}/", b"403"),
            ("CONNECT files.test", b"400"),
            ("CONNECT files.test:x", b"400"),
            ("CONNECT :80", b"400"),
            ("GET /a", b"400"),
            ("GET https://files.test/", b"400"),
            ("GET http://[::1/", b"400"),
            ("GET", b"400"),
        ):
            got = await asked_of(proxy, f"{request} HTTP/1.1\r\n\r\n")
            assert got[9:12] == status, (request, got)
        assert asked == []
    # Nothing is left of it.
    with pytest.raises(ConnectionRefusedError):
        await asked_of(proxy, tunnel)


async def test_what_is_left_to_send_reaches_a_program_that_said_it_asks_no_more():
    size = 8 << 20

    async def answer(reader, writer):
        await reader.read()
        writer.write(bytes(size))
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxy_for(OnLoopback(["files.test"])) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(f"CONNECT files.test:{port} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        num_bytes = 0
        # Slower than the data comes.
        while part := await asyncio.wait_for(reader.read(1 << 12), 60):
            num_bytes += len(part)
        writer.close()
    assert num_bytes == size


async def test_a_host_that_does_not_answer_is_told():
    async with web() as (port, _):
        pass
    async with proxy_for(OnLoopback(["files.test"])) as proxy:
        got = await asked_of(proxy, f"CONNECT files.test:{port} HTTP/1.1\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 502 ")
    assert f"files.test:{port} cannot be reached".encode() in got


def test_each_part_of_a_task_has_its_hosts(tmp_path):
    table = """
    [environment]
    network_mode = "allowlist"
    allowed_hosts = ["A.b"]
    [agent]
    network_mode = "no-network"
    [[steps]]
    name = "one"
    [[steps]]
    name = "two"
    [steps.agent]
    network_mode = "allowlist"
    allowed_hosts = ["c.d"]
    [steps.verifier.environment]
    network_mode = "allowlist"
    allowed_hosts = ["e.f"]
    """
    more = {f"steps/{name}/instruction.md": "x" for name in ("one", "two")}
    [task] = read_tasks(write_task(tmp_path, table=table, more=more))
    one, two = task.steps
    assert task.image.table.hosts == ("a.b",)
    assert (one.agent_hosts, one.verifier_hosts) == ((), ("a.b",))
    assert (two.agent_hosts, two.verifier_hosts) == (("c.d",), ("e.f",))
    # A sandbox has one network from its start to its end: public parts get a proxy to everything.
    for line, wanted in (
        ("[agent]\nnetwork_mode = 'no-network'", (EVERYWHERE, (), EVERYWHERE)),
        (
            "[environment]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'",
            ((), (), EVERYWHERE),
        ),
        ("[agent]\nnetwork_mode = 'public'", (None, None, None)),
        ("[environment]\nnetwork_mode = 'no-network'\n[verifier.environment]", ((), (), None)),
    ):
        [task] = read_tasks(write_task(tmp_path / "parts", table=line))
        [step] = task.steps
        assert (task.image.table.hosts, step.agent_hosts, step.verifier_hosts) == wanted, line
    for line, said in (
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a:1']", "without ports"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*']", "without ports"),
        ("[environment]\nallowed_hosts = ['a.b']", "allowlist"),
    ):
        write_task(tmp_path / "odd", table=line)
        with pytest.raises(EnvironmentLoadError, match=said):
            read_tasks(tmp_path / "odd")


def test_clouds_are_refused_with_a_network_that_is_not_whole(tmp_path):
    for mode, more in (("no-network", ""), ("allowlist", "allowed_hosts = ['a.b']")):
        table = f"docker_image = 'a/b'\nworkdir = '/app'\nnetwork_mode = '{mode}'\n{more}\n"
        write_task(tmp_path / "asks", table=f"[environment]\n{table}")
        with pytest.raises(EnvironmentLoadError, match="asks is not public throughout"):
            opened(tmp_path, sandbox="modal")


REWARD = """python3 - > /logs/verifier/reward.txt <<'END'
import os, urllib.request
print(urllib.request.urlopen("http://files.test:" + os.environ["PORT"], timeout=60).read().decode())
END
"""


@pytest.mark.slow
async def test_what_runs_in_a_task_reaches_its_hosts_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(HarborEnvironment, "allowed_hosts", OnLoopback)
    async with web() as (port, asked):
        allowed = "network_mode = 'allowlist'\nallowed_hosts = ['files.test']\n"
        for name, table in {
            "all": f"{TABLE}{allowed}",
            "tests": f"{TABLE}{allowed}".replace("[agent]", "[agent]\nnetwork_mode = 'no-network'"),
        }.items():
            write_task(
                tmp_path / name,
                table=f"{table}[environment.env]\nPORT = '{port}'\n",
                dockerfile=f"{DOCKERFILE}COPY tries.py /workspace/\n",
                tests=REWARD,
                more={"environment/tries.py": TRIES},
            )
        async with playing(opened(tmp_path)) as play:
            rollout, policy = await play("$ python3 /workspace/tries.py", "done")
            assert json.loads(policy.asked[1]) == TRIED
            assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
            assert len(asked) == 2
            # Encrypted connections need the certificates of this machine.
            look = "import ssl; print(ssl.get_default_verify_paths().capath is None)"
            rollout, policy = await play(
                f"$ echo [$http_proxy$HTTPS_PROXY]; python3 -c '{look}'", "done", index=1
            )
            has_none = ssl.get_default_verify_paths().capath is None
            assert policy.asked[1].split() == ["[]", str(has_none)]
            assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
