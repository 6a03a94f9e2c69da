"""`scripts/run_tests.py`: each test is of one part, each folder of one batch; failures are told."""

import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_tests.py"


@pytest.fixture
def runner(monkeypatch):
    spec = spec_from_file_location("run_tests", SCRIPT)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


def test_a_test_of_any_marks_is_of_one_part_alone(runner):
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert [line.partition(":")[0] for line in options["markers"]] == list(runner.KINDS)
    for number in range(2 ** len(runner.KINDS)):
        marks = {kind: bool(number >> place & 1) for place, kind in enumerate(runner.KINDS)}
        parts = [name for name, asked in runner.PARTS.items() if eval(asked, {}, marks)]
        assert len(parts) == (0 if marks["gpu"] else 1), marks


def test_every_folder_of_tests_is_in_one_batch_of_each_part_or_in_check(runner):
    there = sorted(path.parent for path in (ROOT / "tests").rglob("test_*.py"))
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in there}
    for part in runner.PARTS:
        batches = runner.batches_of(part)
        assert len({batch.name for batch in batches}) == len(batches)
        taken = [name for batch in batches for name in batch.folders]
        assert sorted(taken) == sorted(folders - runner.OF_CHECK), part
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck-rules:")[2].partition("\n\n")[0]
    assert all(f"pytest tests/{folder}\n" in f"{recipe}\n" for folder in runner.OF_CHECK)


@pytest.fixture
def small(runner, monkeypatch, tmp_path):
    """The runner over a checkout of two folders with a test or two each."""
    for name, text in {
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "engine", "nightly"]\n',
        "tests/train/test_sums.py": "def test_sum():\n    assert 1 + 1 == 2\n",
        "tests/core/test_words.py": "def test_word():\n    assert 'a' == 'b', 'not the same'\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "TESTS", tmp_path / "tests")
    return tmp_path


@pytest.mark.slow
def test_a_failure_is_told_by_name_and_exit_code_and_the_rest_still_runs(
    runner, small, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "fast", "--workers", "1"])
    assert runner.main() == 1
    shown = capsys.readouterr().out
    assert "not the same" in shown
    assert re.search(r"fast core +\| .*test_words.py::test_word", shown)
    (failed,) = (line for line in shown.splitlines() if line.endswith("FAILED (1)"))
    assert failed.split()[2:5] == ["1", "fast", "core"]
    assert re.search(r"^ +\d+\.\d +tests/train/test_sums.py::test_sum$", shown, re.MULTILINE)
    last = shown.rstrip().splitlines()[-1]
    assert last.startswith("FAILED tests/core/test_words.py::test_word - ")
    assert "not the same" in last, "who sees only the end of the output sees what failed"

    (small / "tests/core/test_words.py").write_text("def test_word():\n    pass\n")
    assert runner.main() == 0
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "nightly"])
    assert runner.main() == 0, "a part without a test has not failed"


def test_a_part_that_there_is_not_is_refused_with_those_that_there_are():
    done = subprocess.run(
        [sys.executable, SCRIPT, "quick"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "quick" in done.stderr
    assert "nightly" in done.stderr
