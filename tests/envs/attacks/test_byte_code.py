"""Byte code in a wheel: Python would run it in place of the source that people read."""

import importlib.util
import marshal
import subprocess
import sys
import zipfile

import pytest
from tests.envs.projects import toy_publication

from telescope_core.errors import RegistryError
from telescope_envs.publish.build import build_wheel
from telescope_envs.rules.wheel import read_wheel

TOY = toy_publication()
MODULE = TOY.release.module
TAG = sys.implementation.cache_tag


def unchecked(source: str) -> bytes:
    """Return byte code that Python uses without a look at the source beside it (PEP 552)."""
    code = marshal.dumps(compile(source, "x", "exec"))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + b"\0" * 8 + code


def test_python_runs_byte_code_in_place_of_another_source(tmp_path) -> None:
    # Why the rule is needed: this is what an installed environment would do.
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "honest.py").write_text("print('honest')\n")
    (tmp_path / "__pycache__" / f"honest.{TAG}.pyc").write_bytes(unchecked("print('evil')"))
    command = [sys.executable, "-c", "import sys; sys.path[0] = sys.argv[1]; import honest"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "evil\n"


@pytest.mark.parametrize(
    "path",
    [
        f"{MODULE}/__pycache__/__init__.{TAG}.pyc",
        f"{MODULE}/hidden.pyc",
        f"{MODULE}/hidden.PYC",
        f"{MODULE}/hidden.pyo",
        f"{MODULE}/__pycache__/anything.txt",
        f"{MODULE}/__PyCache__/x.py",
        f"{MODULE}/inner/__pycache__/x.{TAG}.pyc",
    ],
)
def test_a_wheel_with_byte_code_is_refused(rewrite, path: str) -> None:
    wheel = rewrite(TOY.wheel, {path: unchecked("import os; os._exit(7)")})
    with pytest.raises(RegistryError, match="byte code") as refused:
        read_wheel(wheel, TOY.release.wheel.filename)
    assert path in str(refused.value)


def test_files_that_only_sound_like_it_are_not(rewrite) -> None:
    wheel = rewrite(TOY.wheel, {f"{MODULE}/pyc.txt": b"x", f"{MODULE}/pycache/x.py": b""})
    read_wheel(wheel, TOY.release.wheel.filename)


@pytest.mark.slow
def test_a_build_leaves_out_byte_code(make_project, tmp_path) -> None:
    project = make_project()
    cache = project / "telescope_env_acme_toy" / "__pycache__"
    cache.mkdir()
    (cache / f"__init__.{TAG}.pyc").write_bytes(unchecked("import os; os._exit(7)"))
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(build_wheel(project, tmp_path / "out")) as archive:
        assert [name for name in archive.namelist() if "pyc" in name] == []
