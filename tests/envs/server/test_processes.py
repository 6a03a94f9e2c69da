"""The server as a process: it ends at once, alone on its data, and survives being killed."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import httpx
import pytest
from tests.envs.projects import TOY
from tests.envs.server.sending import Sender, publication_now
from tests.envs.serving import ServedHub, hub_process

from telescope_envs.server.hub import HubStore

pytestmark = pytest.mark.slow
WAIT_S = 120
"""Longest wait for what must happen; nothing is measured."""


@pytest.fixture
def data(tmp_path):
    """A data folder in which acme may publish, and the secret of acme's token."""
    folder = tmp_path / "data"
    with closing(HubStore(folder)) as store:
        store.add_namespace("acme", [])
        secret = ServedHub("", store).token()
    return folder, secret


def big(version: str, num_bytes: int):
    """Return a publication with that many bytes of code."""
    return publication_now(version, code=TOY + "#" * num_bytes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_though_an_upload_never_ends(data, number):
    """The upload goes on until the server is gone: one that waited for it would hang here."""
    folder, secret = data
    with hub_process(folder) as (process, address):
        answers: list[int] = []
        half = b"--x\r\nContent-Disposition: form-data; name=wheel; filename=w\r\n\r\nabc"

        def never_ends():
            yield half
            while process.poll() is None:
                time.sleep(0.05)
                yield b"y"

        def upload() -> None:
            headers = {"content-type": "multipart/form-data; boundary=x"}
            with Sender(address, secret) as sender, suppress(httpx.HTTPError):
                answer = sender.post("/api/releases", content=never_ends(), headers=headers)
                answers.append(answer.status_code)

        thread = threading.Thread(target=upload)
        thread.start()
        with httpx.Client(base_url=address) as client:
            assert client.get("config.json").status_code == 200
            os.kill(process.pid, number)
            code = process.wait(timeout=WAIT_S)
        thread.join()
        assert answers in ([], [503])
        assert code == (0 if number == signal.SIGTERM else 130)
        assert "Traceback" not in process.stderr.read()
    with closing(HubStore(folder, must_exist=True)) as store:
        assert store.catalog() == []
        assert store.database.value("PRAGMA integrity_check") == "ok"


def test_two_servers_of_one_folder_are_refused(data):
    folder, _ = data
    with hub_process(folder) as (process, address):
        program = "from telescope_cli.main import main; main()"
        second = subprocess.run(
            [sys.executable, "-c", program, "hub", "serve", "--data", str(folder), "--port", "0"],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert second.returncode == 4
        assert f"is served by another process ({process.pid})" in second.stderr
        assert httpx.get(f"{address}/config.json").status_code == 200


def test_answers_leave_at_once(data):
    folder, _ = data
    with hub_process(folder) as (_, address), httpx.Client(base_url=address) as client:
        assert client.get("reserved.txt").content
        # With Nagle's algorithm each waits 40 ms for the one before. Without it not every one
        # waits for other programs that long.
        assert any(elapsed_s(client) < 0.03 for _ in range(500))


def elapsed_s(client: httpx.Client) -> float:
    began_s = time.monotonic()
    assert client.get("reserved.txt").content
    return time.monotonic() - began_s


def test_a_port_that_is_taken_is_said(data):
    folder, _ = data
    with hub_process(folder) as (_, address):
        port = address.rpartition(":")[2]
        program = "from telescope_cli.main import main; main()"
        other = folder.parent / "other"
        second = subprocess.run(
            [sys.executable, "-c", program, "hub", "serve", "--data", str(other), "--port", port],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.stderr


def test_an_ipv6_address_may_have_its_brackets(data):
    folder, _ = data
    with hub_process(folder, "--host", "[::1]") as (_, address):
        assert address.startswith("http://[::1]:")
        assert httpx.get(f"{address}/config.json", timeout=WAIT_S).status_code == 200


def test_killed_at_any_moment_it_stays_consistent(data):
    folder, secret = data
    sizes = [1000, 400_000, 4_000_000]
    for round_number, delay_s in enumerate((0.03, 0.1, 0.3)):
        versions = [f"{round_number}.{minor}.0" for minor in range(3)]
        publications = [big(v, size) for v, size in zip(versions, sizes, strict=True)]
        with hub_process(folder) as (process, address):

            def upload(address=address, publications=publications) -> None:
                with Sender(address, secret) as sender:
                    for publication in publications:
                        try:
                            sender.publish(publication)
                        except httpx.HTTPError:
                            return

            thread = threading.Thread(target=upload)
            thread.start()
            time.sleep(delay_s)  # the moment of the kill is what is varied
            os.kill(process.pid, signal.SIGKILL)
            thread.join()
        check_consistency(folder)
        with hub_process(folder) as (_, address), Sender(address, secret) as sender:
            answers = [sender.publish(publication).status_code for publication in publications]
            assert set(answers) <= {200, 201}
            assert [sender.publish(p).status_code for p in publications] == [200] * 3
        check_consistency(folder)
        assert list((folder / "incoming").iterdir()) == []


def check_consistency(folder) -> None:
    """Every line has its file, whole; the database is sound."""
    with closing(HubStore(folder, must_exist=True)) as store:
        assert store.database.value("PRAGMA integrity_check") == "ok"
        for row in store.catalog():
            for release in store.releases.all_of(row.id):
                (url,) = release.wheel.urls
                data = store.artifact(url, max_bytes=release.wheel.size)
                assert hashlib.sha256(data).hexdigest() == release.wheel.sha256
        for file in (folder / "artifacts").rglob("*"):
            if file.is_file():
                assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
