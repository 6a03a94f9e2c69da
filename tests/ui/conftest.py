"""One recorded run and one server for the tests that change neither."""

import time

import pytest
from tests.ui.recorded import write_run
from tests.ui.served import LIMIT_S, served


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
            wait_for_index(one, run)
        yield one


def wait_for_index(ui, run: str) -> None:
    """Wait until all of a run is indexed: until then, answers are of a part of it."""
    end = time.monotonic() + LIMIT_S
    while not ui.get(f"/runs/{run}")["index"]["is_complete"]:
        assert time.monotonic() < end, f"{run} is not indexed after {LIMIT_S:g} s"
