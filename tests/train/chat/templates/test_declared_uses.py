"""Uses that settings or environments declare are refused before anything is started."""

from typing import Any

import pytest

from telescope_core.errors import ConfigError, TemplateLossError
from telescope_core.types import EnvironmentDescription
from telescope_train.chat.probe import declared_uses
from telescope_train.chat.proof import Use
from telescope_train.chat.renderer import load_renderer
from telescope_train.config.schema import TrainConfig

PROMPT = "{{ '|' if add_generation_prompt }}"


def described(**declares: Any) -> EnvironmentDescription:
    return EnvironmentDescription(
        name="x",
        version="0",
        reward_min=0.0,
        reward_max=1.0,
        success_threshold=1.0,
        num_examples={},
        network="none",
        **declares,
    )


@pytest.mark.parametrize(
    ("env", "uses"),
    [({}, []), ({"tool_call_format": "xml"}, []),
     ({"tool_call_format": "native"}, [Use.TOOLS, Use.CALLS])],
)  # fmt: skip
@pytest.mark.parametrize("where", ["environments", "evals"])
def test_tools_that_the_settings_declare_are_refused_before_the_run(env, uses, where, tiny):
    sections = {
        "environments": {"environments": [{"name": "x", "env": env}]},
        "evals": {"environments": [{"name": "y"}], "evals": {"evals": [{"name": "x", "env": env}]}},
    }
    config = TrainConfig.model_validate(
        {
            "run": {"name": "a", "number_of_steps": 1},
            "model": {"model": str(tiny)},
            **sections[where],
        }
    )
    assert declared_uses(config) == uses
    # An environment may have it in its own defaults, and says so when it is opened.
    assert declared_uses(config, [described(offers_tools=bool(uses))]) == uses
    if not uses:
        assert load_renderer(config.model, uses=uses)
        return
    with pytest.raises(ConfigError, match=r"tool_call_parser, .*tool_call_format = \"xml\""):
        load_renderer(config.model, uses=uses)


@pytest.mark.parametrize(
    ("declares", "uses"),
    [
        ({}, []),
        ({"system_prompt": "Add."}, [Use.SYSTEM]),
        ({"system_prompt": "Add.", "sends_system": False}, []),
        ({"sends_system": True, "goes_on": True}, [Use.SYSTEM, Use.SYSTEM_IN_TURNS, Use.TURNS]),
        ({"goes_on": True}, [Use.TURNS]),
        ({"goes_on": False}, []),
        ({"system_prompt": "Add.", "offers_tools": True},
         [Use.SYSTEM, Use.SYSTEM_WITH_TOOLS, Use.TOOLS, Use.CALLS]),
    ],
)  # fmt: skip
def test_what_environments_say_of_themselves_is_refused_before_the_run(declares, uses, tiny):
    config = TrainConfig.model_validate(
        {
            "run": {"name": "a", "number_of_steps": 1},
            "model": {"model": str(tiny)},
            "environments": [{"name": "x"}],
        }
    )
    found = declared_uses(config, [described(), described(**declares)])
    assert found == uses
    # The template of a tiny model takes system messages and turns, but no tools.
    if Use.TOOLS not in uses:
        assert load_renderer(config.model, uses=found)


@pytest.mark.parametrize(
    ("template", "declares", "said"),
    [
        ("{% for m in messages if m.role != 'system' %}|{{ m.content }}{% endfor %}",
         {"system_prompt": "Add."}, "leaves out the system message"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system!') }}"
         "{% endif %}|{{ m.content }}{% endfor %}",
         {"system_prompt": "Add."}, "refuses a conversation of system, user: No system!"),
        ("{% for m in messages[-2:] %}|{{ m.content }}{% endfor %}",
         {"goes_on": True}, "leaves out what the user says once the conversation goes on"),
        ("{% for m in messages %}{% if m.role != 'system' or messages | length < 3 %}"
         "|{{ m.content }}{% endif %}{% endfor %}",
         {"system_prompt": "Add.", "goes_on": True}, "leaves out the system message once"),
    ],
)  # fmt: skip
def test_a_declared_use_that_a_template_loses_is_refused_before_the_run(
    template, declares, said, tiny
):
    config = TrainConfig.model_validate(
        {
            "run": {"name": "a", "number_of_steps": 1},
            "model": {"model": str(tiny), "chat_template": template + PROMPT},
            "environments": [{"name": "x"}],
        }
    )
    assert load_renderer(config.model, uses=declared_uses(config, [described()]))
    with pytest.raises(TemplateLossError, match=said):
        load_renderer(config.model, uses=declared_uses(config, [described(**declares)]))
