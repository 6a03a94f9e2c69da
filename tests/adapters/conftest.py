"""A data folder for the links of the session."""

import os

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where links and virtual environments are: two files may use the same framework."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def home(folder):
    """The same folder, for as long as the tests of one file run."""
    before = os.environ.get("TELESCOPE_HOME")
    os.environ["TELESCOPE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TELESCOPE_HOME"]
    else:
        os.environ["TELESCOPE_HOME"] = before
