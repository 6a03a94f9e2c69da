"""Building a wheel: the same bytes anywhere, from the project's own files and nothing else."""

import json
import os
import subprocess
import zipfile
from dataclasses import replace

import pytest

from telescope_cli.main import main
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_envs.publish.build import (
    build_and_inspect,
    build_wheel,
    copy_sources,
    left_out,
)
from telescope_envs.publish.release import release_of
from telescope_envs.records.projects import read_datasets

CODE = '"""A toy."""\n\nfrom telescope_core import SingleTurnEnvironment\n'
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "telescope-env-acme-toy"
version = "0.1.0"
license = "MIT"
requires-python = ">=3.11"

[project.entry-points."telescope.environments"]
toy = "telescope_env_acme_toy:Toy"

[tool.hatch.build.targets.wheel]
packages = ["telescope_env_acme_toy"]
core-metadata-version = "2.4"
"""


def write(folder, **changes):
    package = folder / "telescope_env_acme_toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(changes.get("code", CODE))
    (folder / "pyproject.toml").write_text(changes.get("pyproject", PROJECT))
    return folder


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_equal_sources_give_equal_bytes_on_another_path_at_another_time_with_another_umask(
    tmp_path,
):
    first = write(tmp_path / "one")
    second = write(tmp_path / "far" / "away" / "two words")
    for path in second.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o777 if path.is_dir() else 0o700)
    one = build_and_inspect(first, tmp_path / "dist1")
    before = os.umask(0o077)
    try:
        two = build_and_inspect(second, tmp_path / "dist2")
    finally:
        os.umask(before)
    assert one.path.read_bytes() == two.path.read_bytes()
    assert (one.sha256, one.contents.version) == (two.sha256, "0.1.0")
    assert [path.name for path in first.iterdir()] == [path.name for path in second.iterdir()]


@pytest.mark.slow
def test_other_sources_give_other_bytes(tmp_path):
    one = build_and_inspect(write(tmp_path / "one"), tmp_path)
    two = build_and_inspect(write(tmp_path / "two", code=f"{CODE}# more\n"), tmp_path)
    assert one.sha256 != two.sha256


@pytest.mark.slow
def test_what_git_ignores_is_not_built(tmp_path):
    project = write(tmp_path / "toy")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("*.key\n")
    package = project / "telescope_env_acme_toy"
    (package / "private.key").write_text("secret")
    (package / "words.txt").write_text("one two")
    names = members(build_wheel(project, tmp_path))
    assert "telescope_env_acme_toy/words.txt" in names
    assert not [name for name in names if name.endswith(".key")]


@pytest.mark.slow
def test_files_of_the_package_that_the_wheel_lacks_are_named_with_the_setting(tmp_path, capsys):
    exclude = 'exclude = ["*.csv"]\ncore-metadata'
    project = write(tmp_path / "toy", pyproject=PROJECT.replace("core-metadata", exclude))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("*.jsonl\n")
    package = project / "telescope_env_acme_toy"
    (package / "data").mkdir()
    (package / "data" / "rows.jsonl").write_text("{}")
    for name in ("rows.csv", "rows.txt"):
        (package / name).write_text("a")
    (project / "notes.md").write_text("not of the package")
    with pytest.raises(SystemExit) as ended:
        main(["env", "build", str(project), "-o", str(tmp_path / "dist"), "--json"])
    assert not ended.value.code
    said = capsys.readouterr()
    ignored, left = json.loads(said.out)["left_out"]
    assert "telescope_env_acme_toy/data/rows.jsonl" in ignored
    assert ".gitignore" in ignored
    assert "telescope_env_acme_toy/rows.csv" in left
    assert "artifacts" in left
    assert "package-data" in left
    assert said.err.count("Note: ") == 2


def test_the_declared_backend_builds(tmp_path):
    backend = """
import zipfile
FILES = {
    "METADATA": "Metadata-Version: 2.4\\nName: telescope-env-acme-toy\\nVersion: 0.3.0\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "entry_points.txt": "[telescope.environments]\\ntoy = telescope_env_acme_toy:Toy\\n",
    "RECORD": "",
}
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "telescope_env_acme_toy-0.3.0-py3-none-any.whl"
    info = "telescope_env_acme_toy-0.3.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("telescope_env_acme_toy/__init__.py", "")
        for path, text in FILES.items():
            wheel.writestr(f"{info}/{path}", text)
    return name
"""
    project = write(
        tmp_path / "own",
        pyproject='[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
    )
    (project / "own.py").write_text(backend)
    built = build_and_inspect(project, tmp_path / "dist")
    assert built.contents.version == "0.3.0"
    assert built.path.name == "telescope_env_acme_toy-0.3.0-py3-none-any.whl"


def test_a_link_out_of_the_project_is_refused(tmp_path):
    project = write(tmp_path / "toy")
    (tmp_path / "outside.txt").write_text("mine")
    (project / "telescope_env_acme_toy" / "data.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ConfigError, match=r"data\.txt"):
        build_wheel(project, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def _link(target):
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize("is_in_git", [False, True])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_link("."), "is a link to a folder"),
        (_link("/nowhere/at/all"), "is a link to '/nowhere/at/all', no file"),
        (_link("data"), "is a link to 'data', no file"),
        (os.mkfifo, "is no plain file but a named pipe"),
    ],
    ids=["folder", "dangling", "circular", "pipe"],
)
def test_what_is_no_file_is_refused_by_its_path(tmp_path, make, what, is_in_git):
    project = write(tmp_path / "toy")
    data = project / "telescope_env_acme_toy" / "data"
    make(data)
    if is_in_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    if is_in_git and make is os.mkfifo:  # which git does not list
        (line,) = left_out(project, ["telescope_env_acme_toy/__init__.py"])
        assert "telescope_env_acme_toy/data is not in the wheel" in line
        assert f"it {what}" in line
        return
    with pytest.raises(ConfigError, match=f"{data} {what}.*git ignore it"):
        build_wheel(project, tmp_path / "dist")


@pytest.mark.parametrize("is_in_git", [False, True])
def test_the_lock_of_a_file_that_emacs_has_open_is_no_source(tmp_path, is_in_git):
    project = write(tmp_path / "toy")
    lock = project / "telescope_env_acme_toy" / ".#__init__.py"
    lock.symlink_to("me@host.123:456")
    if is_in_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        subprocess.run(["git", "-C", str(project), "add", "pyproject.toml"], check=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_sources(project, copy)
    assert (copy / "telescope_env_acme_toy" / "__init__.py").is_file()
    assert not os.path.lexists(copy / "telescope_env_acme_toy" / lock.name)
    assert left_out(project, ["telescope_env_acme_toy/__init__.py"]) == []
    if is_in_git:
        subprocess.run(["git", "-C", str(project), "add", "."], check=True)
        with pytest.raises(ConfigError, match="no file, but a release must contain"):
            copy_sources(project, copy)


@pytest.mark.parametrize("is_in_git", [True, False])
def test_a_file_whose_name_no_wheel_can_hold_is_named_as_such(tmp_path, is_in_git):
    project = write(tmp_path / "toy")
    odd = os.fsencode(project / "telescope_env_acme_toy") + b"/w\xf6rter.txt"
    with open(odd, "w") as file:
        file.write("one")
    if is_in_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        subprocess.run(["git", "-C", str(project), "add", "."], check=True)
    (line,) = left_out(project, ["telescope_env_acme_toy/__init__.py"])
    assert "rter.txt" in line
    assert "rename it" in line
    assert line.encode()
    copy_sources(project, tmp_path / "copy")
    assert len(list((tmp_path / "copy" / "telescope_env_acme_toy").iterdir())) == 1


def test_files_of_a_repository_within_the_project_are_named_as_such(tmp_path):
    project = write(tmp_path / "toy")
    inner = project / "telescope_env_acme_toy" / "inner"
    inner.mkdir()
    (inner / "words.txt").write_text("one")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    subprocess.run(["git", "init", "-q", str(inner)], check=True)
    (line,) = left_out(project, ["telescope_env_acme_toy/__init__.py"])
    assert "inner/words.txt" in line
    assert "another git repository" in line
    copy_sources(project, tmp_path / "copy")
    assert not (tmp_path / "copy" / "telescope_env_acme_toy" / "inner").exists()


@pytest.mark.parametrize(
    ("pyproject", "error", "message"),
    [
        ('[project]\nname = "a"\n', ConfigError, "declares no build backend"),
        ("[project", ConfigError, "not TOML"),
        (PROJECT.replace("0.1.0", "one"), EnvironmentLoadError, "cannot be built.*one"),
        (PROJECT.replace("acme-toy", "acme-other"), ConfigError, "telescope_env_acme_other"),
    ],
)
def test_what_cannot_be_built_is_one_clear_message_and_leaves_nothing(
    tmp_path, pyproject, error, message
):
    project = write(tmp_path / "toy", pyproject=pyproject)
    with pytest.raises(error, match=f"(?s){message}"):
        build_and_inspect(project, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_a_wheel_that_cannot_be_a_release_is_the_fault_of_its_project(tmp_path):
    built = build_and_inspect(write(tmp_path / "toy"), tmp_path / "dist")
    odd = replace(built, contents=replace(built.contents, entry_name="other"))
    with pytest.raises(ConfigError, match="must be named 'toy', got 'other'"):
        release_of(odd, owner="acme", artifacts=("{filename}",), counts_examples=False)


def test_a_byte_order_mark_is_refused_where_build_backends_fail_at_it(tmp_path):
    project = write(tmp_path / "toy", pyproject=f"\ufeff{PROJECT}")
    with pytest.raises(ConfigError, match=r"pyproject\.toml begins with a byte order mark"):
        build_wheel(project, tmp_path / "dist")


def test_a_byte_order_mark_of_the_list_of_datasets_is_skipped(tmp_path):
    (tmp_path / "datasets.json").write_text("[]", encoding="utf-8-sig")
    assert read_datasets(tmp_path) == []


def test_a_folder_without_a_project_says_how_to_begin_one(tmp_path):
    with pytest.raises(ConfigError, match="env init") as refusal:
        build_wheel(tmp_path, tmp_path / "dist")
    assert str(tmp_path) in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
