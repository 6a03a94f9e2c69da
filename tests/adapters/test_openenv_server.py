"""The program and the sessions that serve ours to OpenEnv, with a stand-in for its server."""

import pytest

from telescope_adapters.serving import openenv_server


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--settings", "x"),
        ("--settings", "[1]"),
        ("--settings", '{"size": 3'),
        ("--max-sessions", "0"),
        ("--max-sessions", "many"),
        ("--port", "x"),
    ],
)
def test_a_wrong_option_is_named(capsys, option, text):
    with pytest.raises(SystemExit) as ended:
        openenv_server.main(["tests.adapters.served_echo:Echo", option, text])
    said = capsys.readouterr().err
    assert (ended.value.code, f"argument {option}" in said, repr(text) in said) == (2, True, True)
