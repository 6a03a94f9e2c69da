"""The probe says of each family what playing its scenarios shows."""

import pytest
from tests.train.chat.templates.newer_families import ALL_BY_NAME, ALL_FAMILIES
from tests.train.chat.templates.play import SCENARIOS, play

from telescope_core.errors import ConfigError
from telescope_core.types import Message
from telescope_train.chat.probe import probe_template
from telescope_train.chat.renderer import load_renderer
from telescope_train.chat.template import read_chat_template
from telescope_train.config.schema import ModelSection, TrainConfig
from telescope_train.plan.checks.config import check_config


@pytest.mark.parametrize("family", [pytest.param(one, id=one.name) for one in ALL_FAMILIES])
def test_the_probe_agrees_with_what_is_played(family):
    report = probe_template(family.renderer())
    chains = family.chains
    has_tools = "tools" in chains or "thinking tools" in chains
    if family.takes_system == report.takes_system:
        if "multi" in chains:
            assert report.keeps_answers == (chains["multi"] == 1)
        if "thinking" in chains:
            assert report.keeps_thinking == (chains["thinking"] == 1)
        if has_tools:
            script = SCENARIOS["tools" if "tools" in chains else "thinking tools"][:4]
            played = play(family, script)
            whole = played.prompts[0].token_ids + played.turns[0]
            assert report.keeps_calls == (played.prompts[1].token_ids[: len(whole)] == whole)
    # Without a system message, its tools can be used.
    is_of_system = "system messages with tools" in report.refused and family.takes_system
    assert has_tools or is_of_system or report.keeps_calls is None
    assert report.takes_system == (family.name != "Gemma 2")
    assert report.no_end is None
    assert report.text.startswith("chat template: thinking is read as ")


def test_the_line_for_a_person():
    report = probe_template(ALL_BY_NAME["Qwen3, thinking"].renderer())
    assert (report.keeps_answers, report.keeps_calls, report.keeps_thinking) == (True, True, False)
    read, kept, changed, remedy = report.text.split("; ")
    assert "think" in read
    assert "hermes" in read
    assert "calls" in kept
    assert "thinking" in changed
    assert remedy.startswith("chat_template sets one")
    assert remedy.endswith(": 'chatml-keeps-thinking' or a Jinja file")
    remedy = probe_template(ALL_BY_NAME["DeepSeek-R1"].renderer()).text.split("; ")[2]
    assert remedy.endswith(": 'deepseek-r1-keeps-thinking' or a Jinja file")


@pytest.mark.parametrize("scenario", ["multi", "cut", "tools", "thinking", "thinking tools"])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_the_shipped_template_keeps_everything(scenario, arguments, tmp_path):
    family = ALL_BY_NAME["Qwen3, thinking"].with_template(
        read_chat_template("chatml-keeps-thinking"), arguments
    )
    if arguments and "thinking" in scenario:
        scenario = "tools"
    played = play(family, SCENARIOS[scenario])
    tokenizer = family.tokenizer()
    for prompt in played.prompts:
        rendered = tokenizer.encode(prompt.text, add_special_tokens=False)
        assert list(prompt.token_ids) == rendered
    for before, turn, after in zip(played.prompts, played.turns, played.prompts[1:], strict=False):
        whole = before.token_ids + turn
        assert after.token_ids[: len(whole)] == whole
    report = probe_template(family.renderer())
    assert report.keeps_calls
    assert report.keeps_answers or not arguments


@pytest.mark.parametrize("scenario", ["thinking", "thinking tools"])
def test_the_shipped_template_for_deepseek_keeps_everything(scenario):
    family = ALL_BY_NAME["DeepSeek-R1"].with_template(
        read_chat_template("deepseek-r1-keeps-thinking"), {}
    )
    played = play(family, SCENARIOS[scenario])
    for before, turn, after in zip(played.prompts, played.turns, played.prompts[1:], strict=False):
        whole = before.token_ids + turn
        assert after.token_ids[: len(whole)] == whole
    assert played.messages[-1].reasoning
    report = probe_template(family.renderer())
    assert (report.keeps_answers, report.keeps_calls, report.keeps_thinking) == (True, True, True)
    assert not report.refused


def test_settings_of_the_template(tiny, tmp_path):
    with pytest.raises(ConfigError, match="enable_thinking has no effect"):
        load_renderer(ModelSection(model=str(tiny), enable_thinking=False))
    with pytest.raises(ConfigError, match=r"no <\|im_start\|>, <\|im_end\|>; give a Jinja file"):
        load_renderer(ModelSection(model=str(tiny), chat_template="chatml-keeps-thinking"))
    template = tmp_path / "asks.jinja"
    template.write_text(
        "{{ enable_thinking }}{% for one in messages %}|{{ one.content }}{% endfor %}"
        "{{ '|' if add_generation_prompt }}"
    )
    settings = ModelSection(model=str(tiny), chat_template=str(template), enable_thinking=False)
    renderer = load_renderer(settings)
    asked = [Message(role="user", content="hi")]
    assert renderer.text(asked, add_generation_prompt=True) == "False|hi|"
    assert "writes no end token behind an answer" in probe_template(renderer).text
    named = load_renderer(ModelSection(model=str(tiny), tool_call_parser="mistral"))
    assert named.format.tool_calls.name == "mistral"


def test_an_unknown_parser_is_refused_with_the_settings():
    config = TrainConfig.model_validate(
        {
            "run": {"name": "a", "number_of_steps": 1},
            "model": {"model": "m", "tool_call_parser": "hermse"},
            "environments": [{"name": "x"}],
        }
    )
    with pytest.raises(ConfigError, match=r"tool_call_parser.*'hermse'.*'hermes'"):
        check_config(config)
    model = config.model.model_copy(update={"tool_call_parser": "hermes"})
    assert check_config(config.model_copy(update={"model": model})) is None
