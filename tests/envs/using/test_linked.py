"""`telescope env link`: the folder of a project, used as it is."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.envs.projects import TOY

from telescope_envs.records.links import adapted_links, links
from telescope_envs.records.projects import read_project

PLAY = """
import asyncio, json
from telescope_core.open import open_environment
from telescope_core.finding.locate import locate_environment
from telescope_core.processes import ProcessSettings
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split
import sys

async def main():
    client = open_environment(sys.argv[2], {}, ProcessSettings(isolation=sys.argv[1]))
    request = PlayRequest(split=Split.TRAIN, example_index=0, group_id="g", index=0,
                          sampling=Sampling(max_tokens=4), deadline_s=30)
    rollout = await client.play(request, ScriptedClient(["yes"]).policy("r"))
    about = await client.describe()
    await client.close()
    return rollout.reward, rollout.error, about.version

print(json.dumps(asyncio.run(main())))
"""


def play(isolation: str, name: str = "toy") -> list:
    """Play one rollout in a new process, as a run would."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PLAY, isolation, name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_link_is_used_as_it_is_in_this_process_and_in_workers(telescope, make_project):
    project = make_project(version="0.2.0")
    code, out, _ = telescope("env", "link", str(project))
    assert (code, out) == (0, f"acme/toy 0.2.0: linked to {project}\n")
    assert play("auto") == [1.0, None, "0.2.0"]
    # Of another length: Python takes old byte code for a file of the same second and size.
    make_project(version="0.3.0", code=TOY.replace('== "yes"', '== "not yes"'))
    assert play("process") == [0.0, None, "0.3.0"], "the next run sees the files as they are"
    (row,) = json.loads(telescope("env", "list", "--installed", "--owner", "acme", "--json")[1])
    assert (row["installed"], row["linked"]) == ("0.3.0", str(project))
    assert "0.3.0 linked" in telescope("env", "list", "--installed")[1]
    assert telescope("env", "uninstall", "toy") == (
        0,
        f"acme/toy: no longer linked to {project}\n",
        "",
    )
    assert links() == []
    assert (project / "pyproject.toml").is_file()


@pytest.mark.slow
def test_the_folder_of_a_project_is_used_without_a_link(telescope, make_project):
    project = make_project(version="0.2.0")
    assert play("auto", str(project)) == [1.0, None, "0.2.0"]
    assert links() == []
    about = json.loads(telescope("env", "info", str(project), "--json")[1])
    assert (about["id"], about["installed"], about["folder"]) == (
        "acme/toy",
        "0.2.0",
        str(project),
    )


@pytest.mark.slow
def test_a_file_shows_its_settings_and_is_no_project(telescope, make_project):
    file = make_project() / "telescope_env_acme_toy" / "__init__.py"
    code, out, err = telescope("env", "info", f"{file}:Toy")
    assert code == 0, err
    assert "it is imported from its file" in out
    code, _, err = telescope("env", "validate", f"{file}:Toy")
    assert code == 2
    assert "telescope env init" in err


@pytest.mark.slow
def test_a_link_shows_its_settings_and_needs(telescope, make_project):
    project = make_project()
    assert telescope("env", "link", str(project), "--json")[0] == 0
    shown = " ".join(telescope("env", "info", "toy", "--registry", "nowhere")[2].split())
    assert "unknown registry 'nowhere'" in shown
    tree = telescope("env", "tree", "toy")[1].splitlines()
    assert tree[0] == "acme/toy 0.1.0 (linked)"
    assert tree[1].startswith("`-- telescope-core ")
    assert json.loads(telescope("env", "verify", "toy", "--json")[1])[0]["is_whole"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda project: (project / "pyproject.toml").unlink(), "contains no pyproject.toml"),
        (lambda project: shutil.rmtree(project), "is not a folder"),
        (
            lambda project: shutil.rmtree(project / "telescope_env_acme_toy"),
            "expected the package telescope_env_acme_toy/",
        ),
        (
            lambda project: replace(project, 'toy = "telescope', 'tiy = "telescope'),
            "must be named telescope-env-<owner>-tiy",
        ),
        (
            lambda project: replace(project, ":Toy", ":Toi"),
            "did you mean Toy",
        ),
        (
            lambda project: replace(project, "telescope_env_acme_toy:Toy", "other:Toy"),
            "must be telescope_env_acme_toy:Class",
        ),
        (
            lambda project: replace(project, '["telescope-core"]', '["no-such-package-of-ours>1"]'),
            "uv pip install 'no-such-package-of-ours>1'",
        ),
        (lambda project: replace(project, "0.1.0", "one"), "project.version"),
    ],
)
def test_what_is_no_environment_is_not_linked(telescope, make_project, spoil, message):
    project = make_project()
    spoil(project)
    code, _, err = telescope("env", "link", str(project))
    assert code in (2, 3)
    assert message in err
    assert links() == []


def replace(project: Path, old: str, new: str) -> None:
    path = project / "pyproject.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_project_in_src_is_found(make_project):
    project = make_project()
    (project / "src").mkdir()
    (project / "telescope_env_acme_toy").rename(project / "src" / "telescope_env_acme_toy")
    assert read_project(project).source == project / "src"


def test_what_cannot_be_linked_is_refused_with_what_is_wrong_with_it(telescope, tmp_path):
    for words, said in (
        (["gymm:FrozenLake-v1"], "unknown scheme 'gymm'; did you mean 'gym'"),
        (["gym:"], "expected gym:ID, such as gym:FrozenLake-v1, got 'gym:'"),
        (["inspect"], "expected inspect:ID, such as gym:FrozenLake-v1, got 'inspect'"),
        (["verifiers:sums", "--with", f"{tmp_path}/sums"], "there is no such file or folder"),
        (["openenv:127.0.0.1:9", "--with", "numpy"], "so no package is installed for them"),
    ):
        code, out, err = telescope("env", "link", *words)
        assert (code, out) == (2, ""), words
        assert said in err


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_linked_and_told(telescope):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        name = f"openenv:http://127.0.0.1:{unused.getsockname()[1]}"
        code, out, err = telescope("env", "link", name)
    assert code == 0
    assert out.startswith(f"{name} 0: linked")
    assert name in err
    assert [link.name for link in adapted_links()] == [name]
    assert "linked to this Python;" in telescope("env", "info", name)[1]


@pytest.mark.slow
def test_what_is_not_linked_is_not_unlinked_and_the_nearest_is_named(telescope):
    assert telescope("env", "link", "openenv:http://127.0.0.1:9")[0] == 0
    code, _, err = telescope("env", "uninstall", "openenv:http://127.0.0.1:8")
    assert code == 2
    assert "unknown link 'openenv:http://127.0.0.1:8'; did you mean 'openenv:http://127" in err
