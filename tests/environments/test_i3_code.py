"""I3 code: fixture rows over a loopback Hub, every layout of tests, and what cheats earn."""

import base64
import json
import pickle
import zlib

import pytest
from tests.asking import ask
from tests.environments.dataset_runs import ENVIRONMENTS, same_in_another_process, unplayed

from telescope_core import Example, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_i3_code import I3Code
from telescope_env_telescope_i3_code.environment import DATASET, REVISION, with_prelude
from telescope_env_telescope_i3_code.rows import example_of
from telescope_env_telescope_i3_code.tests import (
    Case,
    call_test,
    called_name,
    cases_of,
    chosen,
    stdin_test,
)
from telescope_envs.validation.fixture_hub import FixtureHub

FACTORY = "telescope_env_telescope_i3_code:I3Code"
ROWS = ENVIRONMENTS / "i3-code" / "fixture-rows"
TABLE = ROWS / DATASET / "code/train.jsonl"


@pytest.fixture(scope="module")
def over_the_hub(tmp_path_factory):
    """What two processes with different hash seeds saw, and the paths that were asked for."""
    with FixtureHub(ROWS) as hub:
        variables = hub.environ(tmp_path_factory.mktemp("home"))
        [first], [second] = same_in_another_process([[FACTORY, {}]], variables)
    return (first, second), hub.requested


@pytest.mark.slow
def test_gold_reaches_the_maximum_and_others_stay_at_the_floor(over_the_hub):
    (told, _), _ = over_the_hub
    assert {split: len(found) for split, found in told["splits"].items()} == {
        "train": 22,
        "eval": 2,
    }
    for one in (one for found in told["splits"].values() for one in found):
        rewards = {kind: found["reward"] for kind, found in one["earned"].items()}
        assert rewards.pop("gold") == 1.0, one
        assert set(rewards.values()) == {0.0}, one
        assert one["earned"]["gold"]["metrics"] == {"has_program": 1.0, "share_passed": 1.0}


@pytest.mark.slow
def test_two_processes_agree_and_the_pinned_commit_is_asked_for(over_the_hub):
    (first, second), requested = over_the_hub
    assert unplayed(first) == second
    ids = {split: {one["id"] for one in found} for split, found in first["splits"].items()}
    assert not ids["train"] & ids["eval"]
    assert first["revisions"] == {DATASET: REVISION}
    assert any(path.startswith(f"/datasets/{DATASET}/resolve/{REVISION}/") for path in requested)
    (declared,) = json.loads((ROWS.parent / "datasets.json").read_text())
    assert (declared["repo"], declared["revision"]) == (DATASET, REVISION)


SUM = {"inputs": ["1 2\n", "5 5\n", "-1 1\n"], "outputs": ["3\n", "10\n", "0\n"]}
GOOD = "print(sum(map(int, input().split())))"


def table(tmp_path, *rows: dict) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


async def earned(settings: dict, reply: str, *, timeout_s: float = 60.0):
    evals_only = {"train_split": "", "eval_split": "test"}
    environment = I3Code.from_settings({"test_timeout_s": timeout_s, **evals_only, **settings})
    client = InProcessEnvironment(environment, name="code")
    request = ask(split=Split.EVAL, deadline_s=600)
    rollout = await client.play(request, ScriptedClient([reply]).policy("r"))
    await environment.close()
    assert rollout.error is None
    return rollout


def block(program: str) -> str:
    return f"```python\n{program}\n```"


CHEATS = {
    "knows the first answer": "print(3)",
    "ends early": "import os\nos._exit(0)",
    "prints a verdict": "print('all tests passed')\nprint('{\"value\": 3, \"passed\": true}')",
    "reads files": (
        "import glob\nfor p in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline'):"
        "\n    try: print(open(p).read())\n    except OSError: pass"
    ),
    "crashes": "import ctypes\nctypes.string_at(0)",
    "is too long": f"{GOOD}\n{'#' * 200_000}",
    "holds NUL": f"{GOOD}\n# \0",
    "holds half a character": f"{GOOD}\n# \ud800",
}


ENDLESS = ("while True: pass", "import sys\nwhile True: sys.stdout.write('3' * 65536)")


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_stay_at_the_floor(tmp_path, cheat):
    path = table(tmp_path, {"question": "Add.", "input_output": json.dumps(SUM)})
    assert (await earned({"path": path}, block(CHEATS[cheat]))).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("program", ENDLESS)
async def test_a_program_without_an_end_stays_at_the_floor(tmp_path, program):
    path = table(tmp_path, {"question": "Add.", "input_output": json.dumps(SUM)})
    assert (await earned({"path": path}, block(program), timeout_s=0.2)).reward == 0.0


@pytest.mark.slow
async def test_a_function_that_equals_everything_earns_nothing(tmp_path):
    tests = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    path = table(tmp_path, {"question": "Add.", "info": json.dumps({"tests": json.dumps(tests)})})
    same = "class A:\n    def __eq__(self, o): return True\ndef add(*a): return A()"
    assert (await earned({"path": path}, block(same))).reward == 0.0
    assert (await earned({"path": path}, block("def add(a, b): return a + b"))).reward == 1.0


@pytest.mark.slow
async def test_the_share_is_a_setting_and_failures_are_told(tmp_path):
    path = table(tmp_path, {"question": "Add.", "tests": SUM})
    rollout = await earned({"path": path, "score": "share"}, block("print(3)"))
    assert rollout.reward == pytest.approx(1 / 3)
    assert rollout.metrics["share_passed"] == pytest.approx(1 / 3)
    assert [note.value for note in rollout.info] == ["wrong output: 3"]
    assert (await earned({"path": path}, f"I think\n{block(GOOD)}\nso.")).reward == 1.0
    assert (await earned({"path": path}, GOOD)).metrics["has_program"] == 0.0


PRIVATE = [{"input": "[1,2]\n3", "output": "6", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode()
STARTER = "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n        "
LIVE = {
    "question_content": "Add all.",
    "starter_code": STARTER,
    "public_test_cases": json.dumps([{"input": "[]\n1", "output": "1", "testtype": "functional"}]),
    "private_test_cases": PACKED,
    "metadata": json.dumps({"func_name": "total"}),
}


@pytest.mark.slow
async def test_the_columns_of_livecodebench(tmp_path):
    settings = {"path": table(tmp_path, LIVE)}
    good = f"{STARTER}return sum(nums) + k"
    assert (await earned(settings, block(good))).reward == 1.0
    only_public = f"{STARTER}return 1"
    rollout = await earned({**settings, "score": "share"}, block(only_public))
    assert rollout.reward == 0.5
    prompt = rollout.messages[0].content
    assert "Begin with this code:\n```python\nclass Solution:" in prompt
    assert "Write the Python function or method `total`." in prompt
    assert "6" not in prompt


def cases(**columns):
    return cases_of(example_of({"question": "q", **columns}, path="p"))


NAMES = (
    "inf > gcd(4, 6) == 2 and comb(4, 2) == 6 and ceil(sqrt(3)) == 2 and floor(1.5) == 1",
    "deepcopy([1]) == copy.copy([1]) and operator.add(1, 2) == 3 and json.dumps(1) == '1'",
    "pow(3, 2, 5) == 4 and compile('1', '', 'eval') and open and abs(-1) == 1 and len('a') == 1",
    "datetime.timedelta(1) == timedelta(1) and date(2020, 1, 1) and time.time() > 1",
    "ascii_lowercase in string.ascii_letters and mean([1, 3]) == 2 and random.random() < 1",
    "isinstance(Counter('a'), dict) and defaultdict(list) == {} and deque() is not None and cache",
    "ListNode(1, ListNode()).next.val == 0 and TreeNode(1).left is None and Optional[List[int]]",
)


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n", '"""a"""\n'])
def test_the_names_that_sites_import_are_there(future):
    program = f"{future}def f(): return [{', '.join(f'bool({one})' for one in NAMES)}]"
    space: dict = {}
    exec(compile(with_prelude(program), "solution.py", "exec", dont_inherit=True), space)
    assert space["f"]() == [True] * len(NAMES)


def test_packed_tests_cannot_run_code(capsys):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ConfigError, match=r"builtins\.print"):
        cases(private_test_cases=packed)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("columns", "facts"),
    [
        ({"tests": "[1"}, ["tests"]),
        ({"tests": {"inputs": ["a"], "outputs": []}}, ["1 inputs", "0 outputs"]),
        ({"tests": [{"input": "a"}]}, ["'output'"]),
        ({"info": {"source": "x"}}, ["no tests"]),
        ({"private_test_cases": "!"}, ["base64"]),
    ],
)
def test_tests_that_cannot_be_read_are_one_message(columns, facts):
    with pytest.raises(ConfigError) as refused:
        cases(**columns)
    assert all(fact in str(refused.value) for fact in facts), refused.value


@pytest.mark.parametrize(
    ("row", "facts"),
    [({"question": "q"}, ["tests", "private_test_cases"]), ({"tests": "x"}, ["question"])],
)
def test_rows_that_are_no_problems_are_one_message(row, facts):
    with pytest.raises(ConfigError) as refused:
        example_of(row, path="p")
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_values_of_calls_are_read_as_tables_write_them():
    def test_of(given, expected):
        made = call_test(Case(given=given, expected=expected), "f")
        return list(made.arguments), made.expected, list(made.alternatives)

    assert test_of('[1, 2]\n"a"\n', "true") == ([[1, 2], "a"], True, [])
    assert test_of("(1, 2)\nTrue\nplain", "x y") == ([[1, 2], True, "plain"], "x y", [])
    assert test_of([[1], 2], [[3]]) == ([[1], 2], [[3]], [[3]])
    assert test_of([1], [3, 4]) == ([1], [3, 4], [])
    assert test_of(["a"], "5") == (["a"], 5, ["5"])
    assert call_test(Case(given={"x": 1}, expected=1), "f").keywords == {"x": 1}
    assert stdin_test(Case(given=["1", ["2", 3]], expected=4)).stdin == "1\n2\n3"


def test_a_method_is_called_only_where_there_is_no_function():
    assert called_name("f", "class Solution:\n    def f(self): pass") == "Solution.f"
    assert called_name("f", "class Solution: pass\ndef f(): pass") == "f"
    assert called_name("f", "x = 1") == "f"


def test_some_tests_are_taken_evenly_and_repeated_ones_count_once():
    many = [Case(given=str(number), expected="") for number in range(100)]
    assert [one.given for one in chosen(many, 4)] == ["0", "25", "50", "75"]
    assert chosen(many, 0) == chosen(many, 100) == many
    both = [{"input": "1", "output": "2"}]
    assert len(cases(public_test_cases=both, private_test_cases=json.dumps(both)).cases) == 1


def test_ids_are_hashes_of_the_question_alone():
    one = example_of({"question": "q", "tests": "[]", "gold": "x"}, path="p")
    assert one.id == example_of({"question": "q", "tests": "[1]"}, path="p").id
    assert isinstance(one, Example)
    assert json.loads(TABLE.read_text().splitlines()[0])["question"]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"path": "acme/problems"}, ["'acme/problems'", "env.revision"]),
        ({"train_split": ""}, ["train_split", "eval_split"]),
        ({"sandbox": "lokal"}, ["'lokal'", "'local'"]),
    ],
)
def test_settings_that_cannot_work_are_one_message(settings, facts):
    with pytest.raises(ConfigError) as refused:
        I3Code.from_settings(settings)
    assert all(fact in str(refused.value) for fact in facts), refused.value
