"""One recorded run and one server for the tests that change neither."""

import pytest
from tests.ui.recorded import write_run
from tests.ui.served import served


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
