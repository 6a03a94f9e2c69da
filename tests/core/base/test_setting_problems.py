"""What a person is told of wrong settings: one problem for each value, in the words of a file."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from telescope_core.environments.settings import EnvironmentConfig, read_settings
from telescope_core.errors import ConfigError
from telescope_core.settings.config import load_config


class Entry(BaseModel):
    name: str
    size: int = 1


class Wide(BaseModel):
    streams: Literal["auto"] | bool = "auto"
    place: str | int = "driver"
    keeps: Literal["full"] | Literal["some", "few"] | None = None
    shares: Literal["auto", False] = "auto"
    betas: tuple[float, float] = (0.9, 0.99)
    pair: tuple[float, float] | None = None
    names: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)
    entries: Annotated[tuple[Entry, ...], Field(min_length=1)]


WHOLE = 'entries = [{ name = "a" }]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("streams = 'maybe'", "streams: expected 'auto' or true or false, got 'maybe'"),
        ("place = 1.5", "place: expected a valid string or a valid integer, got 1.5"),
        ("keeps = 'all'", "keeps: expected 'full' or 'some' or 'few', got 'all'"),
        ("shares = true", "shares: expected 'auto' or false, got true"),
        ("betas = 0.9", "betas: expected a list, got 0.9"),
        ("betas = ['x', 1]", "betas[0]: expected a valid number, got 'x'"),
        ("betas = ['x']", "betas[0]: expected a valid number, got 'x'"),
        ("betas = [0.9]", "betas: expected 2 items, got [0.9]"),
        ("betas = []", "betas: expected 2 items, got []"),
        ("betas = [1, 1, 1]", "betas: expected at most 2 items, got [1, 1, 1]"),
        ("pair = [0.9]", "pair: expected 2 items, got [0.9]"),
        ("names = []", "names: expected at least 1 item, got []"),
    ],
)
def test_a_value_is_one_problem_whatever_it_may_be_instead(tmp_path, text, said):
    path = tmp_path / "run.toml"
    path.write_text(WHOLE + text)
    with pytest.raises(ConfigError) as caught:
        load_config(Wide, [path], [])
    line = WHOLE.count("\n") + 1
    assert str(caught.value) == f"{path}: {said} (line {line})"


def test_a_list_is_not_also_too_short_where_its_items_are_wrong(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("entries = [{ size = 'x' }]")
    with pytest.raises(ConfigError) as caught:
        load_config(Wide, [path], [])
    missing, wrong = str(caught.value).splitlines()
    assert missing.startswith(f"{path}: entries[0].name ")
    assert wrong.startswith(f"{path}: entries[0].size")
    assert "'x'" in wrong
    path.write_text("entries = []")
    with pytest.raises(ConfigError, match=r"entries: .*\b1 item"):
        load_config(Wide, [path], [])


class Mode(EnvironmentConfig):
    mode: Literal["a", "b"] | bool = True
    size: int = 3


@pytest.mark.parametrize(
    ("settings", "named", "expected"),
    [
        ({"mode": "x"}, "env.mode", ["'a'", "'b'", "true", "false", "'x'"]),
        ({"size": "x"}, "env.size", ["integer", "'x'"]),
    ],
)
def test_settings_of_environments_are_told_alike(settings, named, expected):
    with pytest.raises(ConfigError) as caught:
        read_settings(Mode, settings, owner="Echo (echo.py)")
    assert str(caught.value).startswith(f"Echo (echo.py): {named}: ")
    assert all(fact in str(caught.value) for fact in expected), caught.value


class OfModels(EnvironmentConfig):
    count: int = 1
    entry: Entry = Entry(name="a")
    entries: tuple[Entry, ...] = ()
    sizes: frozenset[int] = frozenset()
    is_on: bool | int = False


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"count": True}, "env.count"),
        ({"entry": {"name": "b", "size": False}}, "env.entry.size"),
        ({"sizes": [2, True]}, "env.sizes.1"),
        ({"entries": [{"name": "b"}, {"name": "c", "size": True}]}, "env.entries.1.size"),
    ],
)
def test_true_and_false_are_no_numbers_at_any_depth(settings, place):
    assert read_settings(OfModels, {"count": 2, "is_on": True}, owner="env.py").is_on is True
    with pytest.raises(ConfigError, match=f"env.py: {place}: expected a number, which true"):
        read_settings(OfModels, settings, owner="env.py")
