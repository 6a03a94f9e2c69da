"""Which files an environment consists of, and that a change of any of them is told."""

import sys
import textwrap
from pathlib import Path

import pytest

from telescope_core.base.code_files import (
    _in_settings,
    code_files,
    digest_of_files,
    file_changes,
)
from telescope_core.base.environment_record import changes, record_of
from telescope_core.base.file_proofs import quick_digest
from telescope_core.finding.locate import locate_environment

FILES = {
    "env.py": """
        import json, numpy
        import helper, parts.tool
        from pack.sub import deep
        from telescope_core.environments import SingleTurnEnvironment

        class Toy(SingleTurnEnvironment):
            def examples(self, split):
                rows = Path(__file__).parent / "data" / "rows.jsonl"
                more = Path(__file__).with_name(f"more-{split}.json")
                return json.loads(os.path.join(HERE, "data", "names.txt"))
    """,
    "helper.py": "import os, not_installed",
    "parts/tool.py": "",
    "pack/__init__.py": "",
    "pack/sub/__init__.py": "",
    "pack/sub/deep.py": "from . import other\nfrom .. import words",
    "pack/sub/other.py": "def broken(:",
    "pack/words.py": "NAMES = 'names.csv'",
    "pack/names.csv": "a,b",
    "data/rows.jsonl": "{}",
    "data/names.txt": "a",
    "more-train.json": "{}",
    "more-test.json": "{}",
}
OTHERS = ("unrelated.py", "data/unread.jsonl", "notes.jsonl", "output.log")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in {**FILES, **dict.fromkeys(OTHERS, "1")}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_stands_for_all_that_it_imports_and_names_from_its_folder(folder):
    before = set(sys.modules)
    assert set(code_files(locate_environment("env.py:Toy"), {})) == set(FILES)
    assert not {"env", "helper", "pack"} & (set(sys.modules) - before)  # nothing was imported


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_any_file_is_told_by_its_name(folder, name):
    before = record_of(locate_environment("env.py:Toy"))
    assert changes(before, record_of(locate_environment("env.py:Toy"))) == []
    with (folder / name).open("a") as stream:
        stream.write(" ")
    after = record_of(locate_environment("env.py:Toy"))
    assert changes(before, after) == [f"file {name}: its content is another one"]
    assert before.digest != after.digest


def test_files_that_come_and_go_are_told_and_others_are_none(folder):
    before = record_of(locate_environment("env.py:Toy"))
    for name in OTHERS:
        (folder / name).write_text("2")
    (folder / "more-test.json").unlink()
    (folder / "more-other.json").write_text("{}")
    assert changes(before, record_of(locate_environment("env.py:Toy"))) == [
        "file more-other.json: it is new",
        "file more-test.json: it is gone, or no longer used",
    ]
    # One of an earlier version has no files, and says nothing of them.
    assert file_changes({}, before.files) == []
    assert digest_of_files({}) == ""


def test_an_importable_class_and_an_editable_package_are_known_alike(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    assert set(code_files(locate_environment("env:Toy"), {})) == set(FILES)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine.py").write_text("import helper\nclass Mine: ...")
    found = code_files(locate_environment("elsewhere/mine.py:Mine"), {})
    assert set(found) == {"mine.py", "helper.py"}


@pytest.mark.slow
def test_what_is_installed_from_a_wheel_is_not_followed(folder):
    (folder / "env.py").write_text("import pytest, json, telescope_core\nclass Toy: ...")
    assert set(code_files(locate_environment("env.py:Toy"), {})) == {"env.py"}
    # Of a package without any record, given as module:Class, its own modules are.
    found = code_files(locate_environment("_pytest.config:Config"), {})
    assert {"_pytest/config/__init__.py", "_pytest/stash.py"} <= set(found)
    assert not any(name.startswith("pluggy") for name in found)


def test_a_file_that_the_settings_name_belongs_to_it(folder):
    location = locate_environment("env.py:Toy")
    before = record_of(location, {"path": "data/unread.jsonl", "level": "hard", "size": 3})
    (folder / "data/unread.jsonl").write_text("other")
    after = record_of(location, {"path": "data/unread.jsonl", "level": "hard", "size": 3})
    assert changes(before, after) == [
        "file settings: path = data/unread.jsonl: its content is another one"
    ]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"path": "set"}, "path = set/test.jsonl"),
        ({"path": "set"}, "path = set/eval/more.parquet"),
        ({"dataset": {"folders": ["./set"]}}, "dataset.folders = ./set/test.jsonl"),
        ({"files": ["set/test.jsonl", "set/eval/more.parquet"]}, "files = set/test.jsonl"),
    ],
)
def test_tables_in_folders_and_lists_of_the_settings_belong_to_it(folder, settings, name):
    (folder / "set/eval").mkdir(parents=True)
    for file in ("test.jsonl", "eval/more.parquet", "notes.md"):
        (folder / "set" / file).write_text("{}")
    location = locate_environment("env.py:Toy")
    before = record_of(location, settings)
    (folder / "set/notes.md").write_text("other")
    assert not changes(before, record_of(location, settings))
    (folder / name.partition(" = ")[2]).write_text("other")
    after = record_of(location, settings)
    assert changes(before, after) == [f"file settings: {name}: its content is another one"]


def test_a_cache_and_a_word_that_is_the_name_of_a_folder_are_no_data(folder):
    (folder / "train").mkdir()
    (folder / "train/rows.json").write_text("{}")
    location = locate_environment("env.py:Toy")
    for settings in ({"split": "train"}, {"cache_dir": "train"}, {"path": "none"}, {"path": ""}):
        assert code_files(location, settings) == code_files(location, {})


@pytest.mark.slow
def test_large_files_are_read_in_parts_from_the_first_byte_to_the_last(tmp_path):
    path, size = tmp_path / "weights", 80 * 2**20
    with path.open("wb") as stream:
        stream.truncate(size)
    digests = {quick_digest(path)}
    for place in (0, size // 2, size - 1):
        with path.open("r+b") as stream:
            # Where no part is read, a single byte is not seen: what is written anew differs in all.
            stream.seek(max(0, place - 2**18))
            stream.write(b"\1" * 2**19)
            stream.truncate(size)
        digests.add(quick_digest(path))
    assert len(digests) == 4
    path.write_bytes(path.read_bytes()[:-1])
    assert quick_digest(path) not in digests


def test_a_setting_that_is_no_path_here_is_no_file(folder, monkeypatch):
    location = locate_environment("env.py:Toy")
    # The prompt is longer, in bytes, than any name may be, and nobody has the name of the second.
    settings = {"prompt": "\u5b57" * 200, "words": ["~nobody-has-this-name", "a\0b"]}
    assert code_files(location, settings) == code_files(location, {})

    # As for another user than root, who may not enter a folder or read a file.
    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as within:
        within.setattr(Path, "stat", refused)
        within.setattr("os.stat", refused)
        assert not [*_in_settings({"path": "notes.jsonl"})]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert not [*_in_settings({"path": "notes.jsonl", "data_dir": "data"})]
