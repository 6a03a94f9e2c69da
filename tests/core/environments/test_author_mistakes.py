"""Mistakes of new authors: each is one message with its cause, its place and what to do."""

import pytest
from tests.core.playing import One, play

from telescope_core import (
    Environment,
    EnvironmentConfig,
    Example,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    SplitSource,
    ToolEnvironment,
    cleanup,
    group_reward,
    metric,
    reward,
    setup,
    stop,
    tool,
)
from telescope_core.errors import EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.rollout import play_gold
from telescope_core.types import RolloutStatus, Split

HERE = "test_author_mistakes.py"


def says(value=1.0):
    def right(self):
        return value

    return right


def method(mark):
    def takes_episode(self, episode):
        return False

    return mark(takes_episode)


def looks_up(self, key: str) -> str:
    """Look something up."""
    return key


async def waits(self, *arguments):
    return None


AT_DEFINITION = [
    ({"score": reward(says())}, "reward right (", "'score' would be replaced"),
    ({"play": reward(says())}, "'play' would be replaced by it", "such as play_reward"),
    ({"config": metric(says())}, "metric", "'config' would be replaced by it"),
    ({"examples": group_reward(lambda self, rollouts: [])}, "'examples' would be replaced", ""),
    ({"caller": method(setup)}, "setup takes_episode (", "'caller' would be replaced"),
    ({"find_stop": method(stop)}, "'find_stop' would be replaced", "find_stop_stop"),
    ({"close": method(cleanup)}, "'close' would be replaced by it", "close_cleanup"),
    ({"close": tool(looks_up)}, "tool looks_up (", "'close' would be replaced"),
    ({"system_prompt": 5}, "system_prompt must be text, got 5 (int)", HERE),
    ({"system_prompt": b"Hi"}, "must be text, got b'Hi' (bytes)", "value.decode()"),
    ({"system_prompt": says("Hi")}, "must be text, got a method", "@property"),
    ({"max_turns": "3"}, "max_turns must be a whole number that is at least 1, got '3'", HERE),
    ({"max_turns": 0}, "max_turns must be a whole number that is at least 1, got 0", HERE),
    ({"max_turns": True}, "at least 1, got True (bool)", HERE),
    ({"max_turns": 2.5}, "at least 1, got 2.5", HERE),
    ({"max_threads": 0}, "max_threads must be a whole number", HERE),
    ({"reward_max": "1"}, "reward_max must be a finite number, got '1' (str)", HERE),
    ({"reward_min": float("-inf")}, "reward_min must be a finite number, got -inf", HERE),
    ({"success_threshold": None}, "must be a finite number, got None", HERE),
    ({"network": "internet"}, "network must be one of none, load, always, got 'internet'", HERE),
    ({"needs_answer": "yes"}, "needs_answer must be True, False or None, got 'yes'", HERE),
    ({"right": reward(weight="2")(says())}, "weight must be a finite number, got '2' (str)", HERE),
    ({"right": reward(weight=float("nan"))(says())}, "weight must be a finite number", HERE),
    ({"size": metric(low=2, high=1)(says())}, "low must not be above high, got 2, 1", HERE),
    ({"size": metric(low="0")(says())}, "low must be a finite number, got '0'", HERE),
    ({"end": method(cleanup(deadline_s="9"))}, "a number above 0, got '9'", HERE),
    ({"examples": [1, 2]}, "examples must be a method, got [1, 2] (list)", "as `data`"),
    ({"format_prompt": "Add: {q}"}, "format_prompt must be a method", "def format_prompt"),
    ({"splits": ("eval",)}, "splits must be a method, got ('eval',)", "def splits"),
    ({"splits": lambda self, name: ()}, "must take (self); it takes (self, name)", HERE),
    ({"golden_answers": lambda self: {}}, "must take (self, example)", HERE),
    ({"draw": waits}, "waits (", "must be a plain method: def, not async def"),
    ({"splits": lambda self: 1, "opening": waits}, "must be a plain method", HERE),
    ({"close": lambda self: None}, "must be async def, because it is awaited", HERE),
    ({"score": lambda self, r, x, e: r}, "must be async def, because it is awaited", HERE),
]


@pytest.mark.parametrize(("body", "said", "also"), AT_DEFINITION)
def test_a_class_with_a_mistake_is_refused_where_it_is_defined(body, said, also):
    with pytest.raises(EnvironmentLoadError) as refused:
        type("Broken", (ToolEnvironment,), {"__module__": __name__, **body})
    assert said in str(refused.value)
    assert also in str(refused.value)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (lambda: reward(0.5), "@reward marks a method, got 0.5 (float); give the weight by name"),
        (lambda: group_reward(2), "write"),
        (lambda: metric("size"), "@metric marks a method, got 'size' (str)"),
        (lambda: stop("done"), "@stop marks a method"),
        (lambda: setup(None), "@setup marks a method, got None"),
        (lambda: cleanup(3), "@cleanup marks a method"),
        (lambda: tool("look"), "@tool marks a method, got 'look' (str)"),
        (lambda: tool(timeout_s="3"), "timeout_s must be a number above 0 s, got '3'"),
        (lambda: reward(property(says())), "@reward marks a method"),
    ],
)
def test_a_decorator_that_marks_no_method_says_where(mark, said):
    with pytest.raises(EnvironmentLoadError) as refused:
        mark()
    assert said in str(refused.value) or "by name" in str(refused.value)
    assert f"{HERE}:" in str(refused.value)


class Fine(One):
    @reward
    def right(self):
        return 1.0


class NoSuper(Fine):
    def __init__(self, config=None):
        self.words = ["a"]


class ToolsWithoutSuper(ToolEnvironment):
    data = ("a", "b")
    right = Fine.right

    def __init__(self, config=None):
        self.config = config

    def tools(self):
        return [len]


class OwnSignature(Fine):
    def __init__(self, words, size):
        super().__init__()


class NoArgument(Fine):
    def __init__(self):
        super().__init__()


class Raises(Fine):
    def __init__(self, config=None):
        super().__init__(config)
        self.words = {}["words"]


class TooEarly(Fine):
    def __init__(self, config=None):
        self.size = self.config.size
        super().__init__(config)


class Hides(Fine):
    def __init__(self, config=None):
        super().__init__(config)
        self.right = 3


class Swapped(Fine):
    reward_min, reward_max = 1.0, 0.0


class NeverSolved(Fine):
    reward_max = 0.5


class AlwaysSolved(Fine):
    success_threshold = 0.0


class TurnsFromText(MultiTurnEnvironment, Fine):
    class Config(EnvironmentConfig):
        turns: str = "3"

    def __init__(self, config=None):
        super().__init__(config)
        self.max_turns = self.config.turns


class ComputedPrompt(Fine):
    @property
    def system_prompt(self):
        return None


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (NoSuper, "NoSuper.__init__ ({}) must begin with super().__init__(config)"),
        (ToolsWithoutSuper, "ToolsWithoutSuper.__init__ ({}) must begin with super().__init__"),
        (OwnSignature, "must take (self, config=None), because it is called with the settings"),
        (NoArgument, "NoArgument.__init__ ({}) must take (self, config=None)"),
        (Raises, "Raises.__init__ ({}) raised KeyError: 'words' ("),
        (TooEarly, "TooEarly.__init__ ({}) raised AttributeError: 'TooEarly' object has no"),
        (Hides, "self.right is set, which hides the reward of that name"),
        (Swapped, "reward_min must be below reward_max, got 1 and 0"),
        (NeverSolved, "no rollout could count as solved, because success_threshold is 1"),
        (AlwaysSolved, "every rollout would count as solved"),
        (TurnsFromText, "max_turns must be a whole number that is at least 1, got '3'"),
        (ComputedPrompt, "system_prompt must be text, got None"),
    ],
)
def test_an_environment_that_cannot_be_built_or_played_is_refused_at_once(cls, said):
    with pytest.raises(EnvironmentLoadError) as refused:
        cls.from_settings({})
    text = str(refused.value)
    assert HERE in text
    for part in said.split("{}"):
        assert part in text


def test_an_author_s_own_attributes_do_not_replace_telescope_s():
    class Own(ToolEnvironment):
        data = ("a", "b")
        right = Fine.right

        def __init__(self, config=None):
            super().__init__(config)
            self._threads = self._functions = self._connections = self._releases = 7

        @tool
        def look(self, key: str) -> str:
            """Look it up."""
            return key

    assert [one.name for one in Own.from_settings({}).function_tools()] == ["look"]


class DrawsNothing(SingleTurnEnvironment):
    right = Fine.right

    def draw(self, random):
        Example(id="1", prompt="p")


class DrawsNumbers(SingleTurnEnvironment):
    right = Fine.right

    def draw(self, random):
        number = random.randrange(50)
        return Example(id=number, prompt=str(number), answer=number)


class KeysByNumber(SingleTurnEnvironment):
    right = Fine.right

    def examples(self, split):
        return SplitSource(
            lambda random: Example(id="1", prompt="p"), split=split, seed=0, split_key=lambda _: 3
        )


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (DrawsNothing, "what DrawsNothing.draw ({}:"),
        (DrawsNothing, ") returns must be an Example, got None"),
        (KeysByNumber, ") must return text, got 3 (int)"),
    ],
)
async def test_what_draw_returns_is_checked_with_its_place(cls, said):
    client = InProcessEnvironment(cls.from_settings({}), name="it")
    with pytest.raises(EnvironmentLoadError) as refused:
        await client.example(Split.EVAL, 0)
    await client.close()
    assert HERE in str(refused.value)
    for part in said.split("{}"):
        assert part in str(refused.value)
    assert "telescope_core/" not in str(refused.value)


async def test_numbers_as_ids_are_text_also_where_they_are_drawn():
    client = InProcessEnvironment(DrawsNumbers.from_settings({}), name="it")
    example = await client.example(Split.EVAL, 0)
    await client.close()
    assert example.id == example.prompt == example.answer


class TextSplits(Fine):
    def splits(self):
        return "eval"


class OtherSplits(Fine):
    def splits(self):
        return ("eval", "test")


class ListedRevisions(Fine):
    def dataset_revisions(self):
        return ["abc"]


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (TextSplits, ") must return a tuple of splits, such as (Split.TRAIN, Split.EVAL) or"),
        (OtherSplits, "got ('eval', 'test') (tuple)"),
        (ListedRevisions, ") must return a dict of texts by name, got ['abc'] (list)"),
    ],
)
async def test_what_an_environment_says_about_itself_is_checked(cls, said):
    client = InProcessEnvironment(cls.from_settings({}), name="it")
    with pytest.raises(EnvironmentLoadError) as refused:
        await client.describe()
    await client.close()
    assert said in str(refused.value)
    assert f"{cls.__name__}." in str(refused.value)
    assert HERE in str(refused.value)


async def test_splits_may_be_named_by_text():
    class Named(Fine):
        def splits(self):
            return ["eval"]

    client = InProcessEnvironment(Named.from_settings({}), name="it")
    assert [*(await client.describe()).num_examples] == [Split.EVAL]
    await client.close()


class GoldenRaises(Fine):
    def golden_answers(self, example):
        return {"answer": example.info["steps"]}


class GoldenList(Fine):
    def golden_answers(self, example):
        return [example.answer]


class NextOfNothing(Fine):
    def compute_reward(self, rollout, example):
        return float(next(word for word in rollout.completion_text.split() if word == "no"))


class Measures(Fine):
    value: object = None

    async def play(self, episode):
        await episode.generate()
        episode.metrics["depth"] = self.value


class MeasuresNan(Measures):
    value = float("nan")


class MeasuresHuge(Measures):
    value = 10**400


class ReplacesMetrics(Fine):
    async def play(self, episode):
        await episode.generate()
        episode.metrics = ["deep"]


class PaysHuge(Fine):
    @reward
    def right(self):
        return 10**400


class NeverAsks(Fine):
    async def play(self, episode):
        episode.add("Are you there?")


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (GoldenRaises, "KeyError: 'steps' (in golden_answers GoldenRaises.golden_answers ("),
        (GoldenList, "GoldenList.golden_answers ("),
        (GoldenList, ") must return a dict of texts by name, got ['yes'] (list)"),
        (NextOfNothing, "StopIteration was raised ("),
        (NextOfNothing, "`next` was called on something empty"),
        (MeasuresNan, "episode.metrics['depth'] must be a finite number, got nan (float)"),
        (MeasuresHuge, "episode.metrics['depth'] must be a finite number, got 1000"),
        (ReplacesMetrics, "episode.metrics must be a dict of numbers, got ['deep'] (list)"),
        (PaysHuge, "must return a finite number, got 1000"),
        (NeverAsks, "NeverAsks.play ("),
        (NeverAsks, ") ended without asking the policy for anything"),
    ],
)
async def test_a_mistake_while_a_rollout_is_played_or_scored_names_its_place(cls, said):
    rollout = await play(cls.from_settings({}))
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert said in rollout.error
    assert f"{HERE}:" in rollout.error


class GoldNumber(Fine):
    def gold_answer(self, example):
        return 4


async def test_a_gold_answer_that_is_no_text_is_told():
    with pytest.raises(EnvironmentLoadError, match=r"must return text, a list of texts .* got 4"):
        await play_gold(GoldNumber.from_settings({}), "it", Split.EVAL, 0)


def test_the_usual_classes_are_built():
    assert Fine.from_settings({}).config == EnvironmentConfig()
    assert isinstance(Fine(), Environment)
