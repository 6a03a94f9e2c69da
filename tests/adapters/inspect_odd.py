"""Tasks of inspect_ai that use more of it: each shows one thing that an adapter may get wrong."""

import asyncio

from inspect_ai import Epochs, Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import Score, accuracy, match, model_graded_qa, scorer
from inspect_ai.solver import generate, prompt_template, solver, use_tools
from inspect_ai.tool import ToolError, tool
from inspect_ai.util import JSONSchema, store

QUESTION = "Which river is this?"


def river(**more):
    asked = [ChatMessageUser(content=QUESTION)]
    return MemoryDataset([Sample(input=asked, target="Rhine", **more)])


def scored(value, **more):
    """Return a scorer that gives what `value` says of a state."""

    @scorer(metrics=[accuracy()], name="given")
    def given():
        async def score(state, target):
            return Score(value=value(state, target), **more)

        return score

    return given()


def plain(value, **more):
    return Task(dataset=river(), solver=generate(), scorer=scored(value), **more)


@solver
def changes_all():
    async def solve(state, generate):
        state.metadata["log"]["steps"] += 1
        state.input[0].text = f"Changed. {state.input[0].text}"
        state.target.target.append("Main")
        state.choices[0].value += "!"
        store().set("seen", store().get("seen", 0) + 1)
        await asyncio.sleep(0)
        return await generate(state)

    return solve


@task
def shared():
    """Its reward is 1 if nothing of another rollout is seen."""

    def is_new(state, target):
        seen = (state.metadata["log"]["steps"], store().get("seen"), state.choices[0].value)
        return float(seen == (1, 1, "Rhine!") and list(target) == ["Rhine", "Main"])

    sample = {"metadata": {"log": {"steps": 0}}, "choices": ["Rhine", "Main"]}
    steps = [prompt_template("Exam. {prompt}"), changes_all()]
    asked = [ChatMessageUser(content=QUESTION)]
    data = MemoryDataset([Sample(input=asked, target=["Rhine"], **sample)])
    return Task(dataset=data, solver=steps, scorer=scored(is_new))


@task
def set_for_the_model():
    return Task(
        dataset=river(),
        solver=generate(max_tokens=33, temperature=0.1, stop_seqs=["Q:"]),
        config=GenerateConfig(system_message="Answer in Latin."),
        scorer=match(),
        epochs=Epochs(4, "max"),
    )


@task
def asks_twice():
    @solver
    def twice():
        async def solve(state, generate):
            first = await get_model().generate("Is it wet?")
            state.metadata["first"] = first.completion
            return await generate(state)

        return solve

    def first(state, target):
        return float(state.metadata.get("first") == "yes")

    return Task(dataset=river(), solver=twice(), scorer=scored(first))


@task
def limited(kind="message_limit", limit=3):
    @solver
    def talks_on():
        async def solve(state, generate):
            while True:
                state = await generate(state)
                state.messages.append(ChatMessageUser(content="Go on."))

        return solve

    def num_said(state, target):
        return min(1.0, sum(m.role == "assistant" for m in state.messages) / 10)

    return Task(
        dataset=river(), solver=talks_on(), scorer=scored(num_said), **{str(kind): int(limit)}
    )


@task
def schema():
    form = ResponseSchema(name="answer", json_schema=JSONSchema(type="object"))
    return plain(lambda *_: 1, config=GenerateConfig(response_schema=form))


@task
def timed():
    return plain(lambda *_: 1, cost_limit=1.0)


@task
def below():
    return plain(lambda state, _: 1 if "Rhine" in state.output.completion else -1)


@task
def reads_all():
    """Its scorer reads no answer out of the reply, and gives that as the answer."""

    @scorer(metrics=[accuracy()])
    def said():
        async def score(state, target):
            return Score(value=1, answer=f"{state.output.completion} ")

        return score

    return Task(dataset=river(), solver=generate(), scorer=said())


@task
def several():
    def values(state, _):
        return {"right": 1, "length": len(state.output.completion) / 100}

    scorer = scored(values, answer="All that it said. " * 20)
    return Task(dataset=river(), solver=generate(), scorer=scorer)


@task
def graded(model="", role="grader"):
    judge = model_graded_qa(model=str(model) or None, model_role=str(role) or None)
    return Task(dataset=river(), solver=generate(), scorer=judge)


@task
def words():
    return plain(lambda *_: "good")


@task
def many(size):
    samples = [Sample(input=f"{i}+1=", target=str(i + 1)) for i in range(int(size))]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=match())


@tool
def look():
    async def execute(where: str) -> str:
        """Look.

        Args:
            where: Where.
        """
        raise ToolError(f"nothing in {where}")

    return execute


@task
def looks():
    return Task(dataset=river(), solver=[use_tools(look()), generate()], scorer=match())


@task
def agent():
    return Task(dataset=river(), solver=react(tools=[look()]), scorer=match())


@task
def exactly():
    """Its reward is 1 for the one right answer, and is asked for twice."""
    steps = [generate(), generate()]
    return Task(
        dataset=river(),
        solver=steps,
        scorer=scored(
            lambda state, _: float(state.output.completion == "Rhine"), answer="the Rhine"
        ),
    )


@task(name="renamed")
def named_twice(level: int = 1):
    return Task(name="own", dataset=river(), solver=generate(), scorer=match())
