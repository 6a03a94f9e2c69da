"""Datasets of Harbor tasks that a registry lists: fetched once, by name and version."""

import functools
import http.server
import json
import subprocess
import threading
from contextlib import contextmanager

import pytest
from tests.adapters.harbor_folders import write_task
from tests.adapters.linking import telescope

from telescope_adapters.harbor_registry import dataset_folder
from telescope_adapters.harbor_tasks import read_tasks
from telescope_core.errors import ConfigError, UnknownNameError


def git(folder, *words) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@contextmanager
def served(folder):
    """The address of a folder that is served, and the paths that are asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def listed(tasks, name="few", version="1.0") -> dict:
    return {"name": name, "version": version, "description": "", "tasks": tasks}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_a_registry_lacks_is_told(tmp_path):
    write_task(tmp_path / "data" / "one")
    registry = tmp_path / "data" / "registry.json"
    one = {"name": "one", "path": "one"}
    registry.write_text(json.dumps([listed([one]), listed([one], version="2.0"), listed([], "no")]))
    folder = dataset_folder(str(registry), "few@2.0")
    assert [task.name for task in read_tasks(folder)] == ["one"]
    write_task(tmp_path / "data" / "one", table='[task]\nname = "org/changed"\n')
    assert [task.name for task in read_tasks(folder)] == ["org/changed"]
    with pytest.raises(ConfigError, match=r"needs a version: few@1\.0, few@2\.0"):
        dataset_folder(str(registry), "few")
    with pytest.raises(UnknownNameError, match=r"few@1\.0"):
        dataset_folder(str(registry), "few@1.1")
    with pytest.raises(ConfigError, match="no tasks"):
        dataset_folder(str(registry), "no@1.0")
    for text, said in (("{", "no list"), ('[{"name": 1}]', "no list")):
        registry.write_text(text)
        with pytest.raises(ConfigError, match=said):
            dataset_folder(str(registry), "few@1.0")
    with pytest.raises(ConfigError, match="cannot be read"):
        dataset_folder(str(tmp_path / "missing.json"), "few@1.0")
    nowhere = (tmp_path / "nowhere").as_uri()
    for task, said in (
        ({"git_url": "ext::sh -c x", "path": "one"}, "cannot be fetched"),
        ({"git_url": nowhere, "path": "../one"}, "no path"),
        ({"git_url": nowhere, "path": "one", "git_commit_id": "--upload-pack=x"}, "no commit"),
        ({"path": "two"}, r"no two/task\.toml"),
    ):
        registry.write_text(json.dumps([listed([{"name": "one", **task}])]))
        with pytest.raises(ConfigError, match=said):
            dataset_folder(str(registry), "few@1.0")


@pytest.mark.slow
def test_a_dataset_is_fetched_once_at_its_commit(tmp_path, home):
    repository = tmp_path / "repository"
    write_task(repository / "tasks" / "one")
    write_task(repository / "other" / "two")
    git(repository, "init", "--quiet")
    git(repository, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "first")
    commit, url = git(repository, "rev-parse", "HEAD"), repository.as_uri()
    write_task(repository / "tasks" / "one", table='[task]\nname = "org/later"\n')
    (repository / "other" / "two" / "out").symlink_to(tmp_path)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "second")
    (tmp_path / "web").mkdir()
    first = [
        {"name": "org/one", "git_url": url, "git_commit_id": commit, "path": "tasks/one"},
        {"name": "org/two", "git_url": url, "git_commit_id": commit, "path": "other/two"},
    ]
    latest = {"name": "one", "git_url": url, "path": "tasks/one"}
    linked = {"name": "two", "git_url": url, "path": "other/two"}
    here = {"name": "here", "path": "here"}
    (tmp_path / "web" / "registry.json").write_text(
        json.dumps(
            [listed(first), listed([latest], "now"), listed([linked], "l"), listed([here], "h")]
        )
    )
    with served(tmp_path / "web") as (address, asked):
        registry = f"{address}/registry.json"
        folder = dataset_folder(registry, "few@1.0")
        assert [task.name for task in read_tasks(folder)] == ["org__one", "org__two"]
        assert [task.name for task in read_tasks(dataset_folder(registry, "now@1.0"))] == [
            "org/later"
        ]
        for dataset, said in (("l@1.0", "link to outside"), ("h@1.0", "no git_url")):
            with pytest.raises(ConfigError, match=said):
                dataset_folder(registry, dataset)
        settings = json.dumps({"registry": registry, "sandbox": "local", "harness": "terminal"})
        words = ("env", "link", "harbor:few@1.0", "--settings", settings)
        done = telescope(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        num_asked = len(asked)
    # Neither the registry nor the repository is needed again.
    assert dataset_folder(registry, "few@1.0") == folder
    done = telescope("env", "validate", "harbor:few@1.0", "--json", folder=tmp_path)
    assert [one["solution"] for one in json.loads(done.stdout)] == [1.0, 1.0], done.stderr
    assert len(asked) == num_asked
