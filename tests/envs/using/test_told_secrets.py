"""The secrets that an installed environment may read are told by name, however it came here."""

import asyncio
import sys

import pytest
from tests.envs.projects import TOY, toy_publication

from telescope_cli.env.install import installed, report
from telescope_core.finding.locate import locate_environment
from telescope_core.open import check_workers, open_environment
from telescope_core.processes import ProcessSettings

LINE = "acme/toy may read these environment variables: TOY_KEY (set), TOY_OTHER_KEY (not set)\n"
NAMES = ("TOY_KEY", "TOY_OTHER_KEY")


@pytest.fixture(autouse=True)
def _environ(monkeypatch):
    monkeypatch.setenv("TOY_KEY", "hunter2")
    monkeypatch.delenv("TOY_OTHER_KEY", raising=False)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_names_are_told_on_standard_error_and_values_never(capsys, as_json, is_new):
    release = toy_publication(secrets=NAMES).release
    report([installed("toy", release, is_new=is_new)], as_json=as_json)
    out, err = capsys.readouterr()
    assert err == LINE
    assert "acme/toy" in out
    assert "_KEY" not in out
    assert "hunter2" not in out + err


def test_nothing_is_told_of_an_environment_that_reads_none(capsys):
    report([installed("toy", toy_publication().release, is_new=True)], as_json=False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_install_sync_and_a_bundle_tell_them(telescope, registry, tmp_path):
    own = f'"""Says yes."""\n\n    secrets = {NAMES!r}'
    code = TOY.replace('"""Says yes."""', own)
    registry.store.publish(toy_publication(code=code, secrets=NAMES))
    bundle = str(tmp_path / "toy.zip")
    for arguments in (
        ("install", "toy"),
        ("install", "toy"),
        ("sync", "--locked"),
        ("bundle", "-o", bundle),
        ("install", "--from-bundle", bundle),
    ):
        code, _, err = telescope("env", *arguments)
        assert code == 0, err
        assert err.count(LINE) == (arguments[0] != "bundle")
        assert "hunter2" not in err
    # A run asks the environment itself, in the Python that it is installed in.
    location = locate_environment("toy")
    client = open_environment("toy", location=location)
    found = asyncio.run(check_workers(client, {}, ProcessSettings(), location))
    assert location.interpreter != sys.executable
    assert found == NAMES
