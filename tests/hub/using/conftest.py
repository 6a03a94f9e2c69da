"""`telescope` in this process, over a data folder and a registry of the test's own."""

from collections.abc import Callable

import pytest

from telescope_cli import main as cli


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data folder, and a working directory outside of any project."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(tmp_path / "registry"))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    return tmp_path / "home"


@pytest.fixture
def telescope(home, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run
