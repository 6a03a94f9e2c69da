"""One recorded run and one server for the tests that change neither, and no clock for any."""

import pytest
from tests.ui.recorded import write_run
from tests.ui.served import LIMIT_S, served


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Searches in logs that a busy machine slows down are not cut: tests expect all that fits."""
    monkeypatch.setattr("telescope_ui.pages.logs.LIMIT_S", LIMIT_S)


@pytest.fixture(scope="session")
def recorded_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    write_run(folder / "second", steps=2)
    return folder


@pytest.fixture(scope="session")
def ui(recorded_folder, tmp_path_factory):
    with served([recorded_folder], tmp_path_factory.mktemp("cache")) as one:
        for run in ("first", "second"):
            one.get(f"/runs/{run}")
        yield one
