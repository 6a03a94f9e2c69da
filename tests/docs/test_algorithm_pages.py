"""The reference has a page for every algorithm, and says what the records say."""

import re
import sys
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

import pytest

from telescope_train.algorithms import known_algorithms, load_algorithm
from telescope_train.algorithms.record import Algorithm
from telescope_train.config.schema import AlgorithmSection

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference" / "algorithms"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", known_algorithms())
def test_every_algorithm_has_a_page_with_its_paper(name):
    algorithm, text = load_algorithm(name), (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert f"[{algorithm.paper}]" in text
    assert f'algorithm = "{name}"' in text
    (row,) = re.findall(rf"^\| \[`{name}`\]\({name}\.md\).*$", INDEX, re.MULTILINE)
    assert algorithm.paper.removeprefix("arXiv:") in row
    for bound in (algorithm.clip_low, algorithm.clip_high):
        if bound is not None:
            assert bound in [float(number) for number in re.findall(r"\d[\de.-]*", row)]


def test_every_setting_and_metric_of_losses_is_in_the_reference():
    source = ROOT / "packages/telescope-train/src/telescope_train/algorithms"
    code = "".join(path.read_text(encoding="utf-8") for path in source.glob("*.py"))
    pages = INDEX + "".join(page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md"))
    read = [name for name in AlgorithmSection.model_fields if f"config.{name}" in code]
    assert len(read) > 15
    assert [name for name in read if name not in pages] == []
    metrics = set(re.findall(r'"((?:tis|clip_fraction|loss|seq_is_mask|kl)/\w+)"', code))
    families = {name.partition("/")[0] for name in metrics}
    assert {name for name in families if f"`{name}/" not in INDEX} == set()


def test_the_algorithm_of_the_how_to_fits_in_fifteen_lines(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "how-to" / "add-an-algorithm.md").read_text(encoding="utf-8")
    code = re.search(r'```python title="better_half.py"\n(.*?)```', text, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 15
    (tmp_path / "better_half.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "better_half", raising=False)
    record = import_module("better_half").BETTER_HALF
    sys.modules.pop("better_half")
    required = {field.name for field in fields(Algorithm) if field.default is MISSING}
    assert all(getattr(record, name) for name in required)
