"""The names of telescope_core come from where its checked imports say, and only when asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import telescope_core


def test_every_name_is_the_one_that_type_checkers_see():
    tree = ast.parse(Path(telescope_core.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert set(homes) == set(telescope_core.__all__)
    for name, home in homes.items():
        assert getattr(telescope_core, name) is getattr(import_module(home), name)


def test_an_error_needs_no_environments():
    code = "import sys, telescope_core.errors; print('telescope_core.types' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Rewrd'"):
        _ = telescope_core.Rewrd
    with pytest.raises(ImportError):
        from telescope_core import nothing  # noqa: F401
