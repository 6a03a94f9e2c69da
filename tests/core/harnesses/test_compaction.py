"""What each strategy makes of a history, and which options the harness takes."""

import json

import pytest

from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.harnesses import AgentTask, open_harness
from telescope_core.harnesses.compaction_program import (
    DELEGATE,
    LEFT_OUT,
    SHELL,
    SUMMARIZE,
    SUMMARY,
    Agents,
    compacted,
    main,
)


def history(num_turns: int) -> list[dict]:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "count"},
    ]
    for turn in range(num_turns):
        call = {"id": f"{turn}", "function": {"name": "shell", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"{turn}", "content": f"result {turn}"})
    return messages


def never(messages):
    raise AssertionError("no summary is asked for")


def test_results_are_dropped_but_for_the_last_turns():
    before = history(4)
    after = compacted(before, "drop_tool_results", keep_turns=1, summarize=never)
    assert [one["content"] for one in after if one["role"] == "tool"] == [
        *[LEFT_OUT] * 3,
        "result 3",
    ]
    # Calls stay as they are, and each still has its result.
    assert [one for one in after if one["role"] != "tool"] == [
        one for one in before if one["role"] != "tool"
    ]
    assert before == history(4)


def test_a_window_keeps_the_opening_and_the_last_turns():
    after = compacted(history(4), "sliding_window", keep_turns=2, summarize=never)
    assert after == [*history(4)[:2], *history(4)[-4:]]


@pytest.mark.parametrize("strategy", ["drop_tool_results", "sliding_window"])
def test_fewer_turns_than_are_kept_change_nothing(strategy):
    assert compacted(history(2), strategy, keep_turns=3, summarize=never) == history(2)


def test_a_summary_stands_behind_the_task_and_replaces_the_one_before():
    asked = []

    def summarize(messages):
        asked.append(messages)
        return f"summary {len(asked)}"

    first = compacted(history(2), "summarize", keep_turns=1, summarize=summarize)
    assert asked[0] == [*history(2), {"role": "user", "content": SUMMARIZE}]
    assert first == [
        history(0)[0],
        {"role": "user", "content": f"count\n\n{SUMMARY}\nsummary 1"},
    ]
    second = compacted([*first, *history(1)[2:]], "summarize", keep_turns=1, summarize=summarize)
    assert second[-1]["content"] == f"count\n\n{SUMMARY}\nsummary 2"


def test_without_a_summary_the_last_turns_are_kept():
    after = compacted(history(3), "summarize", keep_turns=1, summarize=lambda messages: "")
    assert after == [*history(3)[:2], *history(3)[-2:]]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"context_strategy": "summarise"}, UnknownNameError),
        ({"max_context_tokens": 0}, ConfigError),
        ({"keep_turns": True}, ConfigError),
        ({"keep_turns": "2"}, ConfigError),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(options, error):
    with pytest.raises(error) as refused:
        open_harness("shell-agent", **options)
    [name] = options
    assert name in str(refused.value)


def test_a_misspelled_option_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'max_context_tokens'"):
        open_harness("shell-agent", max_contxt_tokens=1)


@pytest.mark.parametrize(
    ("name", "arguments"), [("shell", '{"cmd": "ls"}'), ("shell", "ls"), ("bash", '{"command": 1}')]
)
def test_a_call_that_cannot_be_read_is_answered_with_the_right_form(name, arguments):
    call = {"id": "7", "function": {"name": name, "arguments": arguments}}
    told = Agents({"max_turns": 1})._result(call, [SHELL, DELEGATE])
    assert told["tool_call_id"] == "7"
    # As the model writes calls, and not as Python shows them.
    assert 'shell with the arguments {"command": "..."}' in told["content"]
    assert told["content"].endswith(f"got {name} with the arguments {arguments}")


def test_a_program_that_has_no_turns_left_tells_it_by_its_exit_code(tmp_path):
    task = AgentTask(text="t", base_url="", api_key="", model="m", python="python3", max_turns=0)
    program = open_harness("shell-agent").program(task)
    asked = json.loads(program.files["/tmp/agent/task.json"])
    path = tmp_path / "task.json"
    path.write_text(json.dumps({**asked, "answer_file": str(tmp_path / "answer")}))
    with pytest.raises(SystemExit) as ended:
        main(str(path))
    assert ended.value.code == program.max_turns_exit_code
    assert not (tmp_path / "answer").exists()
