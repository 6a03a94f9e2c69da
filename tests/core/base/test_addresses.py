"""What stands for this machine, and what keeps proxies away from it."""

import subprocess
import sys

import pytest

from telescope_core.base.addresses import in_url, is_loopback, reached_directly, without_brackets


@pytest.mark.parametrize(
    ("host", "written"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("node-1", "node-1")],
)
def test_ipv6_has_brackets_in_urls(host, written):
    assert in_url(host) == written
    assert without_brackets(written) == without_brackets(host) == host.strip("[]")


def test_loopback_is_known_in_every_form():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "127.example", "")))


def test_what_was_excepted_stays_so_in_both_spellings():
    found = reached_directly({"no_proxy": "a.org, b.org", "NO_PROXY": "c.org"}, ("10.0.0.1",))
    assert found["no_proxy"] == found["NO_PROXY"]
    expected = ["a.org", "b.org", "c.org", "localhost", "127.0.0.1", "::1", "10.0.0.1"]
    assert found["no_proxy"].split(",") == expected
    assert reached_directly(found, ("10.0.0.1",)) == found
    assert set(reached_directly({"NO_PROXY": "*"}).values()) == {"*"}


@pytest.mark.slow
def test_every_client_obeys_it():
    """urllib, requests and httpx read the variables, each in its own way."""
    code = (
        "import urllib.request as u, httpx, requests.utils as r\n"
        "for host in ('127.0.0.1', 'localhost'):\n"
        "    assert u.proxy_bypass(host), host\n"
        "    url = f'http://{host}:1'\n"
        "    assert r.should_bypass_proxies(url, None), host\n"
        "    client = httpx.Client()\n"
        "    assert client._transport_for_url(httpx.URL(url)) is client._transport, host\n"
        "assert client._transport_for_url(httpx.URL('http://a.org')) is not client._transport\n"
    )
    dead = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    variables = {**dead, **reached_directly({})}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
