"""How pip, which fetches the wheels of a bundle, is found and told where to look."""

import sys
from types import ModuleType

from telescope_envs.install.bundling import _pip_environment


def test_looking_for_pip_asks_no_finder_that_changes_modules(monkeypatch, tmp_path):
    # The finder of setuptools replaces distutils when it is asked for pip, with a warning.
    own = ModuleType("distutils")
    monkeypatch.setitem(sys.modules, "distutils", own)
    _pip_environment(tmp_path)
    assert sys.modules["distutils"] is own


def test_pip_is_told_what_uv_was(monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", "a,b")
    monkeypatch.setenv("SSL_CERT_FILE", "mine.pem")
    monkeypatch.setenv("PIP_CERT", "pips.pem")
    found = _pip_environment(tmp_path)
    assert found["PIP_FIND_LINKS"] == "a b"
    assert found["PIP_CERT"] == "pips.pem"
