"""Byte code of this interpreter in a new virtual environment, wherever this one keeps its own."""

import py_compile
import sys
import sysconfig
from pathlib import Path

import pytest

from telescope_envs.install.venv import copy_byte_code

FILES = ("alone.py", "pack/__init__.py", "pack/inner.py")
TAG = sys.implementation.cache_tag


@pytest.mark.parametrize("has_prefix", [False, True])
def test_it_stands_where_the_new_environment_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_prefix: bool
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere") if has_prefix else None)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        for name in FILES:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"NAME = {name!r}\n")
    for name in FILES:
        py_compile.compile(str(here / name), doraise=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(here))
    copy_byte_code(there)
    found = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert found - set(FILES) == {
        f"__pycache__/alone.{TAG}.pyc",
        f"pack/__pycache__/__init__.{TAG}.pyc",
        f"pack/__pycache__/inner.{TAG}.pyc",
    }
