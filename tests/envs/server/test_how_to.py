"""The how-to of the server, command by command."""

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.envs.projects import toy_publication
from tests.envs.server.sending import Sender, publication_now
from tests.envs.serving import hub_process

from telescope_envs.server.hub import HubStore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/run-a-hub-server.md"


def test_the_commands_make_a_hub_and_its_copy(tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    add, create, serve, alias, listing, revoke, *lines = lines
    publishers, suspend, restore, audit, proxied, *backup = lines
    assert serve == "telescope hub serve --data hub-data --port 8470"
    assert proxied.startswith(f"{serve} ")
    options = proxied.removeprefix(serve).split()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def sh(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    sh(add)
    secret = sh(create).strip()
    publication = publication_now(name="toy")
    served = hub_process(tmp_path / "hub-data", *options)
    with served as (_, address), Sender(address, secret) as sender:
        assert sender.publish(publication).status_code == 201
        sh(alias)
        (row,) = sh(listing).splitlines()
        sh(revoke.replace("1f0c2a9b", row.split()[0]))
        assert sender.publish(publication_now("0.3.0")).status_code == 401
        sh(publishers)
        assert 'workflow = "environment.yml"' in httpx.get(f"{address}/namespaces/acme.toml").text
        sh(suspend)
        assert httpx.get(f"{address}/namespaces/acme.toml").text.count("suspended") == 1
        sh(restore)
        assert "stolen token" in sh(audit)
        assert 'toy = "acme/toy"' in httpx.get(f"{address}/aliases.toml").text
        for command in backup:
            sh(command)
    with closing(HubStore(tmp_path / "backup", must_exist=True)) as copy:
        assert copy.releases.all_of("acme/toy") == [publication.release]
        (url,) = publication.release.wheel.urls
        assert copy.artifact(url, max_bytes=10**6) == publication.wheel
        assert copy.publish(toy_publication("0.4.0"))
