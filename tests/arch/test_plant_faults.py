"""`scripts/plant_faults.py`: which faults it makes, and that it tells what catches them."""

import ast
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plant_faults.py"
SOURCE = '''
"""A module that is at most 3 lines long."""

import logging

__all__ = ["first", "chosen"]
LIMIT: "int | 1" = 5


def first(values: list[int], *, is_wide: bool = False) -> int | None:
    """Return 1 of 2."""
    total = 0
    if not values or len(values) > LIMIT:
        raise ValueError(f"not {LIMIT + 1} or {len(values) - 1}")
    for value in sorted(values[1:]):
        total += value * (
            2  # twice
        )
    logging.info("total %d", 7)
    values.clear()
    return total


class Chosen:
    def of(self, one, other):
        match one:
            case 8:
                return min(one, other) + 1
        assert one == other, f"{9} are not {one}"
'''
EXPECTED = {
    "5 became 6",
    "False became True",
    "0 became 1",
    "not values became values",
    "len(values) > LIMIT became len(values) >= LIMIT",
    "not values or len(values) > LIMIT became not values and len(values) > LIMIT",
    "raise ValueError(f'not {LIMIT + 1} or {len(values) - 1}') was dropped",
    "sorted(values[1:]) became sorted(values[1:], reverse=True)",
    "values[1:] became values[1 + 1:]",
    "1 became 2",
    "total += value * 2 was dropped",
    "value * 2 became value / 2",
    "2 became 3",
    "values.clear() was dropped",
    "return total became return None",
    "return min(one, other) + 1 became return None",
    "min(one, other) + 1 became min(one, other) - 1",
    "min(one, other) became max(one, other)",
    "one == other became one != other",
}
"""None of texts, types, messages, logging and patterns."""


@pytest.fixture
def script(monkeypatch):
    spec = spec_from_file_location("plant_faults", SCRIPT)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plant_faults", module)
    spec.loader.exec_module(module)
    return module


def test_faults_are_of_every_kind_and_in_nothing_that_is_only_read(script):
    assert {one.what for one in script.faults_of(SOURCE)} == EXPECTED


def test_a_fault_changes_one_place_and_moves_no_line(script):
    for one in script.faults_of(SOURCE):
        changed, lines = one.source.splitlines(), SOURCE.splitlines()
        assert ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(SOURCE)), one.what
        assert len(changed) == len(lines), one.what
        differing = [
            at for at, pair in enumerate(zip(lines, changed, strict=True), 1) if len({*pair}) > 1
        ]
        assert {*differing} <= {*range(one.line, one.last_line + 1)}, one.what


def test_the_seed_chooses_and_every_function_has_its_turn(script):
    faults = script.faults_of(SOURCE)
    few = script.chosen_faults(faults, 3, "0")
    assert {one.function for one in few} == {"", "first", "Chosen.of"}
    assert few == script.chosen_faults(faults, 3, "0")
    assert any(few != script.chosen_faults(faults, 3, seed) for seed in "1234")
    every = script.chosen_faults(faults, 1000, "0")
    assert sorted(one.source for one in every) == sorted(one.source for one in faults)


def test_wrong_usage_is_refused(script, capsys, tmp_path):
    (tmp_path / "outside.py").write_text("")
    for words in ([], ["no/such.py"], [str(tmp_path / "outside.py")], [str(SCRIPT)]):
        with pytest.raises(SystemExit) as ended:
            script.main(words)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        script.main([str(SCRIPT), "--tests", "tests/core", "--faults", "0"])
    assert ended.value.code == 2


MODULE = """def is_large(number):
    return number > 3


def is_even(number):
    return number % 2 == 0


def spins(number):
    while number < 3:
        number += 1
    return number
"""
TESTS = """import subprocess, sys
import pytest
from toy.numbers import is_even, is_large, spins

@pytest.mark.parametrize("number", [1, 4])
def test_is_large(number):
    assert is_large(number) == (number == 4)

def test_by_another_process():
    code = "import sys; from toy.numbers import is_even; sys.exit(is_even(2) is not True)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

def test_spins():
    assert spins(1) == 3
"""


def repository(root: Path, tests: str) -> Path:
    """Make a repository of one package with these tests; returns the file of its functions."""
    package = root / "packages" / "telescope-toy" / "src" / "toy"
    for folder in (package, root / "tests" / "toy"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text(MODULE)
    (root / "tests" / "toy" / "test_numbers.py").write_text(tests)
    (root / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow\n    engine\n    nightly\n    gpu\n"
    )
    subprocess.run(["git", "init", "-q", root], check=True)
    return package / "numbers.py"


@pytest.mark.slow
def test_faults_are_caught_or_survive_in_a_copy(script, monkeypatch, tmp_path):
    file = repository(tmp_path / "repository", TESTS)
    monkeypatch.setattr(script, "ROOT", tmp_path / "repository")
    wanted = ("number > 3 became", "number % 2 == 0 became", "3 became 4", "return number became")
    faults = [one for one in script.faults_of(MODULE) if one.what.startswith(wanted)]
    monkeypatch.setattr(script, "faults_of", lambda source: faults)
    assert script.main([str(file), "--json", str(tmp_path / "out.json"), "--workers", "2"]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    found = {(one["line"], one["what"]): one["caught_by"] for one in results}
    tests = "tests/toy/test_numbers.py::"
    assert found == {
        (2, "number > 3 became number >= 3"): None,
        (2, "3 became 4"): f"{tests}test_is_large[4]",
        # Only a process executes the line: the test is among all others.
        (6, "number % 2 == 0 became number % 2 != 0"): f"{tests}test_by_another_process",
        (10, "3 became 4"): f"{tests}test_spins",
        (12, "return number became return None"): f"{tests}test_spins",
    }
    assert file.read_text() == MODULE


@pytest.mark.slow
def test_tests_that_fail_without_a_fault_are_refused(script, monkeypatch, capsys, tmp_path):
    file = repository(tmp_path / "repository", TESTS.replace("== 3", "== 4"))
    monkeypatch.setattr(script, "ROOT", tmp_path / "repository")
    with pytest.raises(SystemExit) as ended:
        script.main([str(file)])
    assert ended.value.code == 2
    assert "test_spins" in capsys.readouterr().err
