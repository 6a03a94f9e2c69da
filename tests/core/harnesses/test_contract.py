"""What every harness must do, those of other packages included: one file, and one entry point."""

import json
import re
from contextlib import suppress

import pytest

from telescope_core.errors import ConfigError
from telescope_core.harnesses import AgentTask, harness_names, open_harness
from telescope_core.harnesses.installed import harness_excluded, harness_requirements
from telescope_core.harnesses.protocol import AGENT_FOLDER

OPTIONS = {"command": {"argv": ["agent", "{task}"]}}
"""Options that a harness cannot be made without."""
TEXT = 'Mend "it"; $HOME `id`\n{api_key} {model}\ndone: 100%, \u00e4\u4e2d'
TASK = AgentTask(
    text=TEXT,
    base_url="http://127.0.0.1:1/rollouts/x/v1",
    api_key="the-key",
    model="claude-policy",
    python="/agents/bin/python",
    max_turns=7,
)
pytestmark = pytest.mark.parametrize("name", harness_names())


def made(name: str):
    return open_harness(name, **OPTIONS.get(name, {}))


def test_its_packages_are_pinned_and_known_without_making_it(name):
    assert made(name).name == name
    assert made(name).requirements == harness_requirements(name)
    for pin in made(name).requirements:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin), pin
    own = {pin.split("==")[0] for pin in made(name).requirements}
    assert not own & set(harness_excluded(name))


def test_its_program_has_the_task_and_the_endpoint(name):
    program = made(name).program(TASK)
    given = "\n".join((*program.argv, *program.files.values(), *program.environment.values()))
    assert TEXT in given or json.dumps(TEXT) in given
    assert program.environment["OPENAI_BASE_URL"] == TASK.base_url
    assert program.environment["OPENAI_API_KEY"] == "the-key"
    assert program.environment["ANTHROPIC_BASE_URL"] == TASK.base_url.removesuffix("/v1")
    assert all(isinstance(word, str) for word in program.argv)
    assert all(path.startswith(f"{AGENT_FOLDER}/") for path in program.files)
    assert not program.answer_file or program.answer_file.startswith(f"{AGENT_FOLDER}/")
    if made(name).requirements:
        # Files of the task, where commands start, must not be imported in place of its packages.
        assert program.argv[:2] == (TASK.python, "-I")


def test_no_rollout_leaves_something_for_the_next(name):
    harness = made(name)
    first = harness.program(TASK)
    assert harness.program(TASK) == first
    assert made(name).program(TASK) == first


@pytest.mark.parametrize("written", ["", "{}", "[]", "null", '{"info": 1}', "\x00", '{"info": {}}'])
def test_an_answer_that_somebody_spoiled_is_text_or_a_known_error(name, written):
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        assert isinstance(made(name).answer(written), str)


def test_an_option_that_it_does_not_take_is_refused(name):
    with pytest.raises(ConfigError) as refused:
        open_harness(name, no_such_option=1, **OPTIONS.get(name, {}))
    assert f"'{name}'" in str(refused.value)
    assert "no_such_option" in str(refused.value)
