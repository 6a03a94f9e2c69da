"""No environment gets Telescope's own variables, whichever side declares them."""

import pytest

from telescope_core import SingleTurnEnvironment
from telescope_core.errors import EnvironmentLoadError
from telescope_core.processes.frames import Welcome
from telescope_core.processes.handshake import Agreement, Identity
from telescope_core.secret_names import secrets_line


def test_a_class_that_declares_a_token_of_telescope_is_refused_when_it_is_defined():
    with pytest.raises(EnvironmentLoadError) as refused:

        class Greedy(SingleTurnEnvironment):
            secrets = ("JUDGE_KEY", "TELESCOPE_HUB_TOKEN")

    assert all(name in str(refused.value) for name in ("Greedy", "TELESCOPE_HUB_TOKEN"))
    assert "JUDGE_KEY" not in str(refused.value)


@pytest.mark.parametrize("name", ["TELESCOPE_HUB_TOKEN", "Telescope_Worker_Token"])
def test_a_worker_that_asks_for_one_gets_nothing(name):
    identity = Identity(name="acme/toy", version="1")
    with pytest.raises(EnvironmentLoadError, match="no environment gets them"):
        Agreement(identity, ("JUDGE_KEY", name))
    greeting = Welcome(
        protocol=1,
        core_version="1",
        environment="acme/toy",
        environment_version="1",
        pid=7,
        secrets=("JUDGE_KEY", name),
        has_group_rewards=False,
    )
    with pytest.raises(EnvironmentLoadError, match="no environment gets them"):
        Agreement(identity, None).accept(greeting, gets_secrets=True)


@pytest.mark.parametrize("declared", ["JUDGE_KEY", ("JUDGE_KEY", 3), None])
def test_secrets_that_are_no_tuple_of_names_are_refused_with_how_to_write_them(declared):
    with pytest.raises(EnvironmentLoadError, match=r"Odd.*secrets = "):

        class Odd(SingleTurnEnvironment):
            secrets = declared


def test_the_line_says_which_are_set_and_never_a_value():
    environ = {"JUDGE_KEY": "hunter2", "EMPTY_KEY": ""}
    line = secrets_line("acme/toy", ("JUDGE_KEY", "EMPTY_KEY", "OTHER_KEY"), environ)
    assert line == (
        "acme/toy may read these environment variables: "
        "EMPTY_KEY (not set), JUDGE_KEY (set), OTHER_KEY (not set)"
    )
    assert secrets_line("acme/toy", (), environ) == ""


def test_a_name_that_a_worker_made_up_does_not_reach_the_terminal_as_it_is():
    (line,) = secrets_line("acme/toy", ("A\x1b[2J\nB",), {}).splitlines()
    assert line.isprintable()
    assert r"'A\x1b[2J\nB' (not set)" in line
