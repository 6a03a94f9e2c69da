"""The commands of docs/how-to/host-a-registry.md, in its order, on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.envs.loopback_hub import loopback_hub
from tests.envs.projects import toy_publication
from tests.envs.static_host import static_host

from telescope_cli.main import main
from telescope_envs.registry import Opening, locate_release, open_registry
from telescope_envs.registry.stores.folder import LocalStore

PAGE = Path(__file__).parents[3] / "docs/how-to/host-a-registry.md"


def shown(title: str) -> str:
    """Return the file that the page shows under `title`."""
    return PAGE.read_text().partition(f'title="{title}"\n')[2].partition("```")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The registry of the page with one release, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    for name in ("registry/config.json", "registry/namespaces/acme.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(shown(name))
    LocalStore(Path("registry")).publish(toy_publication("0.1.0"))
    return tmp_path


def telescope(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code in (0, None)


@pytest.mark.slow
def test_a_folder_is_checked_rendered_and_served(folder, capsys):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    telescope("hub", "check", "registry", "--against", "origin/main")
    telescope("hub", "render", "registry", "public")
    with static_host(folder / "public") as host:
        opening = Opening(environ={"HOME": str(folder)}, working_directory=folder)
        registry, release = locate_release("acme/toy", host.address, opening)
        assert registry.wheel_bytes(release) == toy_publication("0.1.0").wheel
        capsys.readouterr()
        telescope("env", "list", "--registry", host.address, "--json")
        assert "acme/toy" in [row["id"] for row in json.loads(capsys.readouterr().out)]


@pytest.mark.slow
def test_an_upload_makes_a_registry_on_the_hub(folder):
    with loopback_hub() as hub:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "HF_TOKEN": hub.token,
            "HF_ENDPOINT": hub.address,
            "HF_HUB_DISABLE_XET": "1",
        }
        upload = "hf upload acme/environments registry . --repo-type dataset --private"
        info = "telescope env info acme/toy --registry hf://acme/environments --json"
        for words in (upload.split(), info.split()):
            done = subprocess.run(
                words, env=environ, cwd=folder, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert hub.token not in done.stdout + done.stderr
        assert json.loads(done.stdout)["version"] == "0.1.0"


def test_the_configuration_of_the_page_is_valid(tmp_path):
    path = tmp_path / ".config/telescope/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(shown("config.toml"))
    with static_host(tmp_path) as host:
        text = path.read_text().replace("https://environments.corp.example", host.address)
        path.write_text(text)
        (tmp_path / "config.json").write_text('{"format": 1, "name": "corp"}')
        opening = Opening(environ={"HOME": str(tmp_path)}, working_directory=tmp_path)
        assert open_registry(None, opening).address == host.address
        assert open_registry("corp", opening).config.name == "corp"
