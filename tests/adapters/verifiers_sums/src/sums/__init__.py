"""Environments of the `verifiers` package, as others publish them: sums, with or without a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def exact(completion, answer):
    """1 for the right answer, 0.25 for another number."""
    text = completion[-1]["content"].strip()
    return 1.0 if text == answer else 0.25 * text.isdigit()


def length(completion):
    return float(len(completion[-1]["content"]))


def breaks(completion):
    return 1 / completion[-1]["content"].count("x")


def unset(completion):
    return float("nan")


def worded(completion):
    return {"right": completion[-1]["content"]}


def together(completions):
    return [0.0] * len(completions)


async def judged(prompt, completion, answer, state, judge):
    return float(await judge(prompt, completion, answer, state) == "yes")


async def spent(state):
    """The tokens of the last answer, and those of all where they are added up."""
    usage = state["trajectory"][-1]["response"].usage
    total = (state.get("usage") or {}).get("output_tokens", 0)
    return (usage.completion_tokens + total) / 1000 if usage else 0.25


class Best(vf.Rubric):
    """Rewards the best rollout of an example alone."""

    async def score_group(self, states, **named):
        await super().score_group(states, **named)
        best = max(state["reward"] for state in states)
        for state in states:
            state["reward"] *= state["reward"] == best


class Asks(vf.MultiTurnEnv):
    """Asks again until the answer is a number, and for no more than three turns."""

    @vf.stop
    async def has_number(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"].strip().isdigit()

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "A number, please."}]


class Forgets(Asks):
    """Shows the model its last question alone."""

    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


class StopsOnce(Asks):
    """Its first turn has a stop text of its own, and each later one that of the environment."""

    async def get_model_response(self, *given, **named):
        state = given[0] if isinstance(given[0], dict) else {}
        asked = named.get("prompt") or next(one for one in given if isinstance(one, list))
        if len(asked) == 1:
            common = state.get("sampling_args") or {}
            named["sampling_args"] = {**common, "stop": "</turn>", "top_p": 0.5}
        return await super().get_model_response(*given, **named)


def make(kind: str, common: dict):
    if kind == "stops":
        settings = {"stop": ["</a>"], "temperature": 0.0, "extra_body": {"top_k": 5}}
        return vf.SingleTurnEnv(sampling_args=settings, **common)
    if kind == "turn-stops":
        return StopsOnce(max_turns=3, sampling_args={"stop": ["</a>"]}, **common)
    if kind == "budget":
        made = Asks(max_turns=9, **common)
        if hasattr(made, "set_max_total_completion_tokens"):
            made.set_max_total_completion_tokens(10)
        return made
    if kind == "unrated":
        return vf.SingleTurnEnv(score_rollouts=False, **common)
    if kind == "chooses":
        shaped = {"extra_body": {"guided_regex": "[0-9]+"}}
        return vf.SingleTurnEnv(sampling_args=shaped, **common)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=3, **common)
    if kind in ("turns", "forgets"):
        return (Asks if kind == "turns" else Forgets)(max_turns=3, **common)
    return vf.SingleTurnEnv(system_prompt="Answer.", **common)


def load_environment(kind: str = "single", has_eval: bool = True):
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    if kind == "described":  # two rows with one id
        rows = [{**row, "example_id": i // 2} for i, row in enumerate(rows)]
    if kind in ("strings", "roles"):
        asked = [{"role": "robot", "content": "1+1="}]
        rows = [
            {"prompt": f"{i}+1=" if kind == "strings" else asked, "answer": str(i + 1)}
            for i in range(40)
        ]
    funcs = [
        exact,
        length,
        *{"breaks": [breaks], "unset": [unset], "group": [together]}.get(kind, []),
    ]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0] + [0.0] * (len(funcs) - 1))
    if kind == "judge":
        rubric = vf.JudgeRubric(judge_model="judge")
        rubric.add_reward_func(judged)
    if kind in ("unscored", "worded", "described", "spends", "best"):
        others = {"unscored": [], "worded": [worded], "best": [exact], "spends": [exact, spent]}
        funcs = others.get(kind, [exact, worded])
        weights = [0.5, 1.0] if kind == "spends" else [1.0, 0.0][: len(funcs)]
        rubric = (Best if kind == "best" else vf.Rubric)(funcs=funcs, weights=weights)

    def common():
        made = {"dataset": Dataset.from_list(rows), "rubric": vf.RubricGroup([rubric])}
        return {**made, "eval_dataset": Dataset.from_list(rows[:5]) if has_eval else None}

    if kind in ("strings", "roles"):
        return vf.SingleTurnEnv(**common())
    if kind in ("mixed", "nested", "mixed-breaks", "mixed-group", "mixed-best"):
        kinds = ["single", "tools", "turns"]
        if kind.startswith("mixed-"):
            funcs = [exact, {"mixed-breaks": breaks, "mixed-group": together}.get(kind, length)]
            rubric = (Best if kind == "mixed-best" else vf.Rubric)(funcs=funcs)
        if kind == "nested":
            inner = [vf.EnvGroup([make("turns", common())], ["turns"])]
            inner += [vf.EnvGroup([make(one, common()) for one in kinds[:2]], kinds[:2])]
            return vf.EnvGroup(inner, ["slow", "quick"])
        return vf.EnvGroup([make(one, common()) for one in kinds], kinds)
    return make(kind, common())
