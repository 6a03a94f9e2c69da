"""No environment gets Telescope's own variables, whichever side declares them."""

import pytest

from telescope_core import SingleTurnEnvironment
from telescope_core.errors import EnvironmentLoadError
from telescope_core.processes.handshake import declared_secrets
from telescope_core.secret_names import secrets_line


def test_a_class_that_declares_a_token_of_telescope_is_refused_when_it_is_defined():
    with pytest.raises(EnvironmentLoadError, match=r"Greedy.*TELESCOPE_HUB_TOKEN.*another name"):

        class Greedy(SingleTurnEnvironment):
            secrets = ("JUDGE_KEY", "TELESCOPE_HUB_TOKEN")


@pytest.mark.parametrize("name", ["TELESCOPE_HUB_TOKEN", "Telescope_Worker_Token"])
def test_a_worker_that_asks_for_one_gets_nothing(name):
    environ = {name: "value", "JUDGE_KEY": "key"}
    with pytest.raises(EnvironmentLoadError, match="no environment gets them"):
        declared_secrets(("JUDGE_KEY", name), environ)
    assert declared_secrets(("JUDGE_KEY",), environ) == {"JUDGE_KEY": "key"}


def test_a_person_is_told_the_names_and_never_the_values():
    line = secrets_line("acme/toy", ("JUDGE_KEY", "A_KEY"), {"JUDGE_KEY": "the value"})
    assert line == (
        "acme/toy may read these environment variables: A_KEY (not set), JUDGE_KEY (set)"
    )
    assert secrets_line("acme/toy", (), {"JUDGE_KEY": "the value"}) == ""
