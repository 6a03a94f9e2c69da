"""Environment classes and their settings: what is refused, and how it is said."""

from functools import partial

import pytest
from pydantic import BaseModel, Field

from telescope_core import (
    Environment,
    EnvironmentConfig,
    Example,
    ListSource,
    SingleTurnEnvironment,
    Split,
    ToolEnvironment,
    cleanup,
    reward,
    runs_in,
    setup,
    tool,
)
from telescope_core.environments.settings import read_settings
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.judge import JudgeConfig


class One(SingleTurnEnvironment):
    """One example."""

    def examples(self, split):
        return ListSource([Example(id="one", prompt="yes?")])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"Config": dict}, "Config must be a subclass of EnvironmentConfig"),
        ({"max_turn": 3}, "nothing reads 'max_turn'; did you mean 'max_turns'?"),
        ({"sucess_threshold": 0.5}, "did you mean 'success_threshold'?"),
        ({"right": reward(lambda self, reply: 1)}, "the names are rollout, example"),
        ({"open": setup(lambda self: 1)}, "must take (self, episode); it takes (self)"),
        ({"end": cleanup(deadline_s=0)(lambda self, episode: 1)}, "a number above 0, got 0"),
        ({"open": setup(runs_in("process")(lambda self, e: 1))}, "cannot run in a process"),
        ({"format_prompt": runs_in("process")(lambda self, e: "")}, "only rewards and metrics do"),
        ({"add": tool(runs_in("process")(lambda self: 1))}, "cannot run in a process"),
        ({"add": runs_in("loop")(tool(lambda self: 1))}, "make it async"),
        ({"r": reward(runs_in("process")(lambda self, episode: 1))}, "cannot take the episode"),
        (
            {"sync_runs_in": "process", "r": reward(lambda self, episode: 1)},
            "cannot take the episode",
        ),
        ({"sync_runs_in": "threads"}, "must be one of thread, loop, process, got 'threads'"),
    ],
)
def test_a_class_that_cannot_work_is_refused_where_it_is_defined(body, message):
    with pytest.raises(EnvironmentLoadError) as refused:
        type("Broken", (ToolEnvironment,), body)
    assert message in str(refused.value)


async def own_play(self, episode):
    return await episode.generate()


@pytest.mark.parametrize("name", ["max_turn", "max_turns"])
def test_turns_are_not_limited_where_there_is_one(name):
    with pytest.raises(EnvironmentLoadError, match=f"nothing reads '{name}': .* has one turn"):
        type("Broken", (SingleTurnEnvironment,), {name: 3})
    for base, body in [
        (SingleTurnEnvironment, {"turn_limit": 3, "max_words": 3}),
        (SingleTurnEnvironment, {name: 3, "play": own_play}),
        (Environment, {name: 3}),
    ]:
        type("Own", (base,), body)


class Nested(EnvironmentConfig):
    depth: int = 1


class Configured(One):
    class Config(EnvironmentConfig):
        size: int = 3
        """How many."""
        inner: Nested | None = None

    @reward
    def any(self):
        return 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sise": 3}, "unknown setting 'sise'; did you mean 'size'? (env.sise of Configured ("),
        ({"inner": {"dept": 3}}, "did you mean 'depth'? (env.inner.dept of Configured ("),
        ({"size": "many"}, "test_environment_class.py): env.size: expected a valid integer"),
        ({"size": "many", "inner": {"depth": "x"}}, "env.inner.depth: expected a valid integer"),
    ],
)
def test_settings_that_cannot_be_used_name_the_file_and_the_nearest(settings, message):
    with pytest.raises(ConfigError) as refused:
        Configured.from_settings(settings)
    assert message in str(refused.value)
    assert "test_environment_class.py" in str(refused.value)


def test_a_field_is_described_by_the_docstring_under_it():
    assert Configured.Config.model_fields["size"].description == "How many."
    assert Configured.from_settings({"size": "4", "inner": {"depth": "2"}}).config.inner.depth == 2


class Judging(BaseModel):
    """A table of an author's own, which is no class of ours."""

    model: JudgeConfig = JudgeConfig(max_tokens=20)


class Chosen(EnvironmentConfig):
    direct: JudgeConfig = JudgeConfig(max_tokens=10)
    made: JudgeConfig = Field(default_factory=lambda: JudgeConfig(max_tokens=10))
    maybe: JudgeConfig | None = JudgeConfig(max_tokens=10)
    absent: JudgeConfig | None = None
    of_class: Judging = Judging()
    of_field: Judging = Judging(model=JudgeConfig(max_tokens=10))
    either: Judging | JudgeConfig = JudgeConfig(max_tokens=10)


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("direct", {"max_tokens": 10}),
        ("made", {"max_tokens": 10}),
        ("maybe", {"max_tokens": 10}),
        ("absent", {}),
        ("of_class.model", {"max_tokens": 20}),
        ("of_field.model", {"max_tokens": 10}),
        # Whose fields would they be?
        ("either", {}),
    ],
)
@pytest.mark.parametrize(
    "build", [Chosen.model_validate, partial(read_settings, Chosen, owner="Env (env.py)")]
)
def test_a_setting_in_a_table_leaves_the_others_at_the_authors_default(build, place, kept):
    outer, _, inner = place.partition(".")
    given = {"model": "grader"}
    table = getattr(build({outer: {inner: given} if inner else given}), outer)
    table = getattr(table, inner) if inner else table
    assert table.model_dump(exclude_unset=True) == {**given, **kept}
    assert "temperature" not in table.model_fields_set


def test_secrets_are_read_only_where_they_are_declared(monkeypatch):
    class Keeps(One):
        secrets = ("A_KEY",)

    monkeypatch.setenv("A_KEY", "s3cret")
    monkeypatch.setenv("OTHER_KEY", "s3cret")
    assert Keeps().secret("A_KEY") == "s3cret"
    with pytest.raises(ConfigError, match="'OTHER_KEY' but declares A_KEY; add it to the class"):
        Keeps().secret("OTHER_KEY")
    with pytest.raises(ConfigError, match="declares A_KEY; did you mean A_KEY"):
        Keeps().secret("A_KEYS")
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="needs the environment variable A_KEY, which is not set"):
        Keeps().secret("A_KEY")


def test_an_environment_that_lacks_a_part_says_which():
    with pytest.raises(EnvironmentLoadError) as refused:
        Environment().examples(Split.TRAIN)
    assert all(part in str(refused.value) for part in ("data", "draw"))
