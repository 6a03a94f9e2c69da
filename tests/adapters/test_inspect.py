"""Tasks of inspect_ai through our adapter: the scores are those of their own eval."""

import json
from pathlib import Path

import pytest
from tests.adapters.linking import by_itself, keeps_contract, link, opened, played, telescope

from telescope_core import Completion, Message, Split, ToolCall

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
TASKS = str(Path(__file__).with_name("inspect_tasks.py"))
SUMS = f"inspect:{TASKS}@sums"
ANSWERS = ["1", "The answer is 2", "3 of them", "four", "5", ""]
ITSELF = """
import json, sys, tempfile
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float
answers = json.loads(sys.argv[2])
outputs = [ModelOutput.from_content("mockllm", said) for said in answers]
for output in outputs:
    output.usage = ModelUsage(input_tokens=1, output_tokens=1)  # counting them asks the network
[log] = eval(sys.argv[1], model=get_model("mockllm/model", custom_outputs=outputs),
             max_samples=1, max_connections=1, log_dir=tempfile.mkdtemp())
assert log.status == "success", log.error
scores = {str(s.id): {n: value_to_float()(v.value) for n, v in s.scores.items()}
          for s in log.samples}
print()
print(json.dumps(scores))
"""


@pytest.fixture(scope="module")
def python(home):
    return link(SUMS)


async def test_a_task_keeps_the_contract(python):
    async with opened(SUMS) as client:
        await keeps_contract(client, ["1"], 1.0, Split.EVAL)
        rollout = await played(client, ["1"], split=Split.EVAL)
        assert [m.role for m in rollout.messages] == ["system", "user", "assistant"]
        assert dict((await client.describe()).num_examples) == {Split.EVAL: 6}


async def test_scores_are_those_of_inspect(python):
    theirs = by_itself(python, ITSELF, f"{TASKS}@sums", json.dumps(ANSWERS))
    async with opened(SUMS, {"scorer": "includes"}) as client:
        ours = [
            await played(client, [said], index=i, split=Split.EVAL)
            for i, said in enumerate(ANSWERS)
        ]
    assert {one.example_id: dict(one.metrics) for one in ours} == theirs
    assert [one.reward for one in ours] == [one.metrics["includes"] for one in ours]
    assert {score["includes"] for score in theirs.values()} == {0.0, 1.0}


async def test_tools_are_called_by_their_solver(python):
    call = ToolCall(id="c1", name="add", arguments='{"a": 0, "b": 1}')
    said = Completion(
        message=Message(role="assistant", content="", tool_calls=(call,)),
        finish_reason="tool_calls",
    )
    async with opened(SUMS) as client:
        rollout = await played(client, [said, "1"], split=Split.EVAL)
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert [m.content for m in rollout.messages if m.role == "tool"] == ["1"]


async def test_choices_reach_solver_and_scorer(python):
    name = f"inspect:{TASKS}@choices"
    link(name)
    async with opened(name) as client:
        right = await played(client, ["ANSWER: B"], split=Split.EVAL)
        wrong = await played(client, ["ANSWER: A"], split=Split.EVAL)
    assert (right.error, right.reward, wrong.reward) == (None, 1.0, 0.0)


def test_what_cannot_be_played_is_refused_by_name(python):
    for name, meant in (
        (f"inspect:{TASKS}@boxed", "uses sandbox, which only a whole eval of inspect_ai gives"),
        (f"inspect:{TASKS}@sumz", "unknown inspect_ai task"),
        ("inspect:/nowhere.py@sums", "no such file; expected file.py@task"),
    ):
        done = telescope("env", "link", name)
        assert done.returncode
        assert meant in done.stderr, done.stderr


async def test_a_file_is_linked_from_its_own_folder_and_played_from_any(python):
    here, name = Path(TASKS).parent, f"inspect:{Path(TASKS).name}@sums"
    done = telescope("env", "link", name, folder=here)
    assert done.returncode == 0, done.stderr
    async with opened(name) as client:
        assert (await played(client, ["1"], split=Split.EVAL)).reward == 1.0
