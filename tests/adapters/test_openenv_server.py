"""The program and the sessions that serve ours to OpenEnv, with a stand-in for its server."""

from types import SimpleNamespace

import pydantic
import pytest
from tests.adapters.served_echo import Rewrites

from telescope_adapters.serving import openenv_server
from telescope_core import Example, ListSource, ToolEnvironment, reward, tool
from telescope_core.errors import TelescopeError
from telescope_core.in_process import InProcessEnvironment


class Doubles(ToolEnvironment):
    """Double a number with a tool."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}", prompt="Double 4.", answer="8")])

    @tool
    def double(self, x: int) -> int:
        """Return twice a number."""
        return 2 * x

    @reward
    def right(self, completion, answer):
        return float(completion == answer)


class Observation(pydantic.BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict = {}


class State(pydantic.BaseModel):
    episode_id: str | None = None
    step_count: int = 0


def session_of(environment, monkeypatch):
    """Return a session of a server of `environment`."""
    package = SimpleNamespace(
        Action=pydantic.BaseModel,
        Observation=Observation,
        Environment=object,
        State=State,
        create_fastapi_app=lambda served, reply, *_, **__: (served, reply),
    )
    parts = {"openenv.core.env_server": package, "pydantic": pydantic}
    monkeypatch.setattr(openenv_server, "imported", lambda _, name: parts[name])
    client = InProcessEnvironment(environment, name=type(environment).__name__)
    served, reply = openenv_server.openenv_app(client)
    made = served()
    return SimpleNamespace(
        reset=made.reset_async,
        step=lambda **fields: made.step_async(reply(**fields)),
        state=lambda: made.state,
    )


@pytest.fixture
def session(monkeypatch):
    return session_of(Doubles(), monkeypatch)


async def test_a_conversation_that_is_replaced_is_an_error_and_no_empty_question(monkeypatch):
    session = session_of(Rewrites.from_settings({}), monkeypatch)
    await session.reset(index=0)
    with pytest.raises(TelescopeError, match="Rewrites changed messages"):
        await session.step(content="1")
    with pytest.raises(TelescopeError, match="before reset"):
        await session.step(content="2")


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


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "double", "arguments": '{"x": 4}'}},
        {"type": "function", "function": {"name": "double", "arguments": {"x": 4}}},
        {"name": "double", "arguments": '{"x": 4}'},
        {"name": "double", "arguments": {"x": 4}},
    ],
)
async def test_calls_of_tools_have_the_form_of_the_chat_api_or_a_flat_one(session, call):
    await session.reset(index=0)
    shown = await session.step(tool_calls=[{"id": "c1", **call}])
    assert shown.messages == [{"role": "tool", "content": "8", "tool_call_id": "c1"}]
    assert (await session.step(content="8")).reward == 1.0


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"name": "double", "arguments": "{}"},
        {"id": "", "name": "double"},
        {"id": "c1", "arguments": "{}"},
        {"id": "c1", "function": "double"},
        {"id": "c1", "function": {"arguments": "{}"}},
        {"id": "c1", "function": {"name": None}},
    ],
)
async def test_a_call_of_another_form_is_no_step(session, call):
    await session.reset(index=0)
    with pytest.raises(TelescopeError, match="tool_calls"):
        await session.step(tool_calls=[call])
    assert session.state().step_count == 0
    assert (await session.step(content="8")).reward == 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("split", "test"), ("index", -1), ("index", "x"), ("index", True)]
)
async def test_an_example_that_cannot_be_is_no_reset(session, name, value):
    await session.reset(index=0)
    with pytest.raises(TelescopeError, match=name):
        await session.reset(**{"split": "eval", name: value})
    assert (await session.step(content="8")).reward == 1.0
