"""`telescope hub` as a command: reports, exit codes, JSON alone on stdout."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_cli.main import main

ROOT = Path(__file__).parents[2]
SLOW = {
    *("asyncio", "httpx", "huggingface_hub", "fastapi", "keyring", "packaging.metadata", "tomlkit"),
    *("telescope_core.environments", "telescope_core.processes", "telescope_envs.install.install"),
}
"""What listing does not need, and what takes long to import."""


@pytest.fixture
def telescope(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the committed registry with one of its environments alone."""
    for part in ("config.json", "aliases.toml", "namespaces", "schema", "reserved.txt"):
        source = ROOT / "registry" / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    for part in ("index/telescope", "status/telescope", "artifacts"):
        (tmp_path / part).mkdir(parents=True)
        for file in (ROOT / "registry" / part).glob("*wordle*"):
            shutil.copy(file, tmp_path / part)
    (tmp_path / "aliases.toml").write_text('[aliases]\nwordle = "telescope/wordle"\n')
    return tmp_path


def test_check_says_that_all_holds(telescope, place):
    code, out, err = telescope("hub", "check", str(place))
    assert code == 0
    text = out.replace("\n", " ")
    assert "15 of 17 checks made, all passed" in text
    num_releases = len((place / "index/telescope/wordle.jsonl").read_text().splitlines())
    assert f"(1 environment, {num_releases} releases, 0 commits)" in text
    assert "not checked, because this folder is not in a git" in text
    assert "checking telescope/wordle" in err


def test_check_tells_what_is_wrong_where_and_what_to_do(telescope, place):
    index = place / "index/telescope/wordle.jsonl"
    (first, *_) = index.read_text().replace("five-letter", "six-letter").splitlines(keepends=True)
    index.write_text(first * 2)
    (place / "namespaces/telescope.toml").unlink()
    code, out, _ = telescope("hub", "check", str(place))
    assert code == 1
    for text in ("[namespace]", "[version-once]", "index/telescope/wordle.jsonl:2", "fix: "):
        assert text in out
    assert "2 problems" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= max(80, len(str(place)) + 2)


def test_check_speaks_to_programs(telescope, place):
    (place / "namespaces/telescope.toml").unlink()
    code, out, _ = telescope("hub", "check", str(place), "--json")
    report = json.loads(out)
    assert code == 1
    assert [finding["check"] for finding in report["findings"]] == ["namespace"]
    assert set(report["findings"][0]) == {"check", "where", "what", "fix"}
    assert (report["num_environments"], "history" in report["checks"]) == (1, True)


def test_render_and_schemas_say_what_they_wrote(telescope, place, tmp_path):
    code, out, _ = telescope("hub", "render", str(place), str(tmp_path.parent / "view"), "--json")
    assert code == 0
    view = Path(json.loads(out)["output"])
    assert (view / "simple/telescope-env-telescope-wordle/index.html").is_file()
    code, out, _ = telescope("hub", "schemas", str(place), "--json")
    assert "schema/release.json" in json.loads(out)


@pytest.mark.parametrize("verb", ["check", "schemas", "render"])
def test_a_folder_that_is_no_registry_is_refused(telescope, tmp_path, verb):
    (tmp_path / "empty").mkdir()
    more = [str(tmp_path / "out")] if verb == "render" else []
    code, _, err = telescope("hub", verb, str(tmp_path / "empty"), *more)
    assert code == 2
    assert "is not a registry: it has no config.json" in err
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("verb", ["hub init", "hub schemas", "hub render", "env init"])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_full_disk_is_named_and_a_second_try_succeeds(telescope, tmp_path, verb, was_there):
    place = tmp_path / "place"
    command = {
        "hub init": ("hub", "init", str(place), "--owner", "acme"),
        "hub schemas": ("hub", "schemas", str(place)),
        "hub render": ("hub", "render", str(place), str(tmp_path / "view")),
        "env init": ("env", "init", "acme/one", "--dir", str(place)),
    }[verb]
    if verb in ("hub schemas", "hub render"):
        telescope("hub", "init", str(place), "--owner", "acme")
    elif was_there:
        place.mkdir()
    before = set(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        code, _, err = telescope(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert f"cannot write {tmp_path}/" in err
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= before
    assert place.exists() == (place in before)
    assert telescope(*command)[0] == 0


def test_an_unknown_branch_is_refused(telescope):
    code, out, err = telescope("hub", "check", str(ROOT / "registry"), "--against", "no-such")
    assert (code, out) == (2, "")
    assert "'no-such'" in err


@pytest.mark.parametrize("verb", [("list",), ("search", "math")])
def test_lists_import_only_what_they_need(verb):
    """Ten thousand releases are listed in 0.3 s, of which imports would take the most."""
    program = (
        "import sys\nfrom telescope_cli.main import main\n"
        f"try:\n    main(('env', *{verb!r}, '--registry', {str(ROOT / 'registry')!r}))\n"
        "except SystemExit:\n    print('loaded', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split("loaded ")[-1].split())
    assert "telescope_envs.records.catalog" in loaded
    assert loaded & SLOW == set()
