"""`make gpu-check` without a GPU: what needs none runs, and what was left out is said."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.mark.engine
def test_the_page_has_a_row_for_each_part(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The other process of a transfer finds it by its name.
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 0)
    assert module.main(["1"]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith("| weights over")]
    assert [row.split("|")[4].strip() for row in rows] == ["met", "met", "left out", "left out"]
    assert "telescope-train" in said
