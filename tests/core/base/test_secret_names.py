"""No environment gets Telescope's own variables, whichever side declares them."""

import pytest

from telescope_core import SingleTurnEnvironment
from telescope_core.base.secret_names import (
    HIDDEN,
    secret_values,
    secrets_line,
    without_passwords,
    without_secrets,
    without_values,
)
from telescope_core.errors import EnvironmentLoadError
from telescope_core.processes.frames import Welcome
from telescope_core.processes.handshake import Agreement, Identity


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


SETTINGS = {
    "api_key": "sk-abc123def",
    "max_tokens": 5,
    "level": "digit",
    "HF_TOKEN": "",
    "model_key_2": "sk-second",
    "headers": {"Authorization": "Bearer abcdef", "X-Api-Key": "abcdef", "Accept": "json"},
    "passwords": {"of db": "db password", "tries": 3, "all": ["one", "two"]},
    "judges": [{"url": "https://me:hunter2@host/v1?api_key=q1q1q1&size=3", "secret": "hush-hush"}],
}


def test_what_is_written_of_settings_has_names_and_no_value_of_a_secret():
    assert without_secrets(SETTINGS) == {
        "api_key": HIDDEN,
        "max_tokens": 5,
        "level": "digit",
        "HF_TOKEN": "",
        "model_key_2": HIDDEN,
        "headers": {"Authorization": HIDDEN, "X-Api-Key": HIDDEN, "Accept": "json"},
        "passwords": {"of db": HIDDEN, "tries": 3, "all": [HIDDEN, HIDDEN]},
        "judges": [{"url": f"https://host/v1?api_key={HIDDEN}&size=3", "secret": HIDDEN}],
    }
    values = secret_values(SETTINGS)
    assert values >= {"sk-abc123def", "hunter2", "me:hunter2", "q1q1q1", "db password", "two"}
    assert not values & {"digit", "json", "3"}


def test_settings_that_differ_in_secrets_alone_are_compared_as_the_same():
    again = {**SETTINGS, "api_key": "another", "HF_TOKEN": "given now", "max_tokens": 5}
    del again["model_key_2"]
    written = without_secrets(SETTINGS)
    assert without_secrets(written, keeps_names=False) == without_secrets(again, keeps_names=False)
    assert without_secrets({"max_tokens": 6}, keeps_names=False) == {"max_tokens": 6}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:p@ss:w@h.example:9/v1 answered 500", "http://h.example:9/v1 answered 500"),
        ("https://token@h/x, http://a:b@c", "https://h/x, http://c"),
        ("git+https://u:p@h/x.git@v1", "git+https://h/x.git@v1"),
        ("https://h/x?a=1&X-Amz-Signature=abc#t", f"https://h/x?a=1&X-Amz-Signature={HIDDEN}#t"),
        ("https://h/x?sig=a%2Fb&design=2", f"https://h/x?sig={HIDDEN}&design=2"),
        ("see https://h/~me@home and me@host", "see https://h/~me@home and me@host"),
        ("key=value", "key=value"),
    ],
)
def test_addresses_are_shown_without_passwords(text, shown):
    assert without_passwords(text) == shown
    assert without_passwords(shown) == shown


def test_known_values_are_left_out_of_nested_texts():
    value = {"a hunter2x": ["xhunter2xx", 3, None, {"b": "fine"}]}
    assert without_values(value, {"hunter2x"}) == {
        f"a {HIDDEN}": [f"x{HIDDEN}x", 3, None, {"b": "fine"}]
    }
