"""What is kept of the server of a user: its token, its port, its lock, and folders that joined."""

import os
from pathlib import Path

import pytest

from telescope_core.base.errors import ConfigError
from telescope_ui.files.own_server import DEFAULT_PORT, OwnServer


def test_the_token_is_kept_for_the_user_alone_and_another_one_for_networks(tmp_path):
    state = tmp_path / "state"
    tokens = [OwnServer(state).token(is_loopback=True) for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 40
    assert OwnServer(state).token(is_loopback=False) not in tokens
    assert [path.stat().st_mode & 0o777 for path in (state, state / "token")] == [0o700, 0o600]
    # A file that was cut is no token that somebody could guess.
    (state / "token").write_text("a\n")
    assert len(OwnServer(state).token(is_loopback=True)) > 40


def test_one_process_is_the_server_and_the_others_find_it_until_it_ends(tmp_path):
    first, second = OwnServer(tmp_path), OwnServer(tmp_path)
    assert first.claim()
    first.listens("127.0.0.1", 4711)
    assert not second.claim()
    assert second.running() == ("127.0.0.1", 4711, os.getpid())
    second.join([Path("runs"), Path("/a b/c")])
    assert first.joined() == (Path.cwd() / "runs", Path("/a b/c"))
    with (tmp_path / next(one.name for one in tmp_path.glob("*.folders"))).open("a") as stream:
        stream.write('"/half')
    assert first.joined() == (Path.cwd() / "runs", Path("/a b/c"))
    first.close()
    assert second.claim()
    assert second.joined() == ()
    second.close()


def test_the_port_of_the_last_time_is_tried_first(tmp_path):
    own = OwnServer(tmp_path)
    assert own.ports()[:2] == [DEFAULT_PORT, DEFAULT_PORT + 1]
    own.keep_port(9000)
    assert own.ports()[0] == DEFAULT_PORT, "only the server of the user keeps its port"
    assert own.claim()
    own.keep_port(DEFAULT_PORT + 2)
    own.close()
    assert OwnServer(tmp_path).ports()[:2] == [DEFAULT_PORT + 2, DEFAULT_PORT]


def test_a_state_folder_of_somebody_else_or_without_room_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--port 0"):
        OwnServer(tmp_path / "file" / "ui")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        OwnServer(tmp_path / "state")
