"""Mistakes of new authors in a class: each is one message with its cause, place and remedy."""

import os
from functools import cached_property
from types import FunctionType

import pytest
from tests.core.one_rollout import One

from telescope_core import (
    Environment,
    EnvironmentConfig,
    Example,
    MultiTurnEnvironment,
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
from telescope_core.types import Split

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


def copied(function):
    """Return a function of its own with the same code, which a decorator may mark."""
    return FunctionType(function.__code__, globals(), function.__name__)


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
    ({"right": staticmethod(reward(says()))}, "@staticmethod above @reward hides it", HERE),
    ({"right": property(reward(says()))}, "@property above @reward hides it", HERE),
    ({"right": cached_property(metric(says()))}, "@cached_property above @metric hides", HERE),
    ({"end": classmethod(method(stop))}, "@classmethod above @stop hides it", HERE),
    ({"begin": staticmethod(method(setup))}, "@staticmethod above @setup hides it", HERE),
    ({"end": staticmethod(method(cleanup))}, "@staticmethod above @cleanup hides it", HERE),
    ({"look": staticmethod(tool(looks_up))}, "@staticmethod above @tool hides it", HERE),
]


@pytest.mark.parametrize(("body", "said", "also"), AT_DEFINITION)
def test_a_class_with_a_mistake_is_refused_where_it_is_defined(body, said, also):
    with pytest.raises(EnvironmentLoadError) as refused:
        type("Broken", (ToolEnvironment,), {"__module__": __name__, **body})
    assert said in str(refused.value)
    assert also in str(refused.value)


def yields(self, episode):
    yield


async def yields_async(self, episode):
    yield


@pytest.mark.parametrize("function", [yields, yields_async])
@pytest.mark.parametrize(
    ("mark", "kind"),
    [
        (setup, "setup"),
        (stop, "stop"),
        (cleanup, "cleanup"),
        (reward, "reward"),
        (metric, "metric"),
        (tool, "tool"),
    ],
)
def test_a_marked_method_with_a_yield_would_never_run(mark, kind, function):
    marked = mark(copied(function))
    with pytest.raises(EnvironmentLoadError, match=rf"{kind} {function.__name__} .* a yield"):
        type("Yielding", (ToolEnvironment,), {"marked": marked})


def test_a_group_reward_with_a_yield_would_never_run():
    def spread(self, rollouts):
        yield 1.0

    with pytest.raises(EnvironmentLoadError, match=r"group_reward spread .* return the value"):
        type("Yielding", (ToolEnvironment,), {"spread": group_reward(spread)})


class Marked(ToolEnvironment):
    right = reward(weight=0.5)(says())
    size = metric(low=0)(says())
    begin = method(setup)
    look = tool(looks_up)


@pytest.mark.parametrize(
    ("name", "member", "said"),
    [
        ("right", says(), "write @reward(weight=0.5) above it, or right = None"),
        ("right", property(says()), "write @reward(weight=0.5)"),
        ("size", says(), "write @metric above it"),
        ("begin", says(), "write @setup above it"),
        ("look", says(), "write @tool above it"),
    ],
)
def test_a_marked_method_is_replaced_by_a_marked_one_or_by_none(name, member, said):
    for bases in ((Marked,), (type("Mixin", (), {name: member}), Marked)):
        body = {name: member} if len(bases) == 1 else {}
        with pytest.raises(EnvironmentLoadError) as refused:
            type("Changed", bases, body)
        assert said in str(refused.value)
        assert f"{HERE}:" in str(refused.value)
    without = type("Without", (Marked,), {name: None})
    counted = [one.name for one in (*without.score_functions, *without.hooks)]
    assert name not in counted
    assert len(counted) == (3 if name == "look" else 2)


def test_a_tool_needs_an_environment_with_tools():
    with pytest.raises(EnvironmentLoadError, match=r"tool looks_up.*\(ToolEnvironment\)"):
        type("Untooled", (MultiTurnEnvironment,), {"look": tool(looks_up)})


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


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (lambda: reward(wieght=0.5), "@reward has no argument 'wieght'; did you mean 'weight'?"),
        (lambda: group_reward(wait=2), "@group_reward has no argument 'wait'"),
        (lambda: metric(lower_better=True), "did you mean 'lower_is_better'?"),
        (lambda: metric(0, 1), "@metric takes its arguments by name, got 1 by position"),
        (lambda: cleanup(deadline=3), "did you mean 'deadline_s'?"),
        (lambda: tool(timeout=3), "did you mean 'timeout_s'?"),
        (lambda: setup(order=1), "@setup has no argument 'order'; write @setup alone"),
        (lambda: stop(after=1), "@stop has no argument 'after'"),
    ],
)
def test_an_argument_that_a_decorator_does_not_take_is_refused(mark, said):
    with pytest.raises(EnvironmentLoadError) as refused:
        mark()
    assert said in str(refused.value)
    assert f"{HERE}:" in str(refused.value)


def test_hooks_may_be_marked_with_empty_parentheses():
    body = {"begin": method(setup()), "end": method(stop()), "close_it": method(cleanup())}
    found = {hook.name: hook.kind for hook in type("Hooked", (ToolEnvironment,), body).hooks}
    assert found == {"begin": "setup", "end": "stop", "close_it": "cleanup"}


class Fine(One):
    @reward
    def right(self):
        return 1.0


def test_a_method_is_marked_once():
    with pytest.raises(EnvironmentLoadError, match=r"@metric.*@reward"):
        reward(metric(says()))


def test_a_hook_is_marked_once():
    with pytest.raises(EnvironmentLoadError, match=r"takes_episode .*@stop and @setup"):
        setup(method(stop))


def test_two_marked_methods_of_one_name_in_a_class_are_refused():
    with pytest.raises(EnvironmentLoadError, match=r"reward Twice.right .* would replace"):

        class Twice(One):
            @reward
            def right(self):
                return 1.0

            @reward(weight=0.5)
            def right(self):  # noqa: F811
                return 0.0

    with pytest.raises(EnvironmentLoadError, match=r"tool Mixed.look .* would replace"):

        class Mixed(ToolEnvironment):
            @setup
            def look(self, episode):
                pass

            @tool
            def look(self, key: str) -> str:  # noqa: F811
                """Look something up."""
                return key


def test_a_name_of_another_class_or_of_the_module_is_free():
    class Right(Fine):
        @reward
        def right(self):
            return 0.5

        class Inner(Fine):
            @reward
            def right(self):
                return 0.5

    assert [one.name for one in Right.score_functions] == ["right"]


@pytest.mark.parametrize(("mark", "name"), [(reward, "mean"), (metric, "mean"), (metric, "reward")])
def test_names_of_numbers_that_results_have_are_refused(mark, name):
    with pytest.raises(EnvironmentLoadError, match=f"{name!r} is the name of the"):
        type("Shadowing", (One,), {name: mark(says())})


class DataAndDraw(Fine):
    data = ("a", "b")
    examples = Environment.examples

    def draw(self, random):
        return Example(id="1", prompt="p")


def test_two_places_of_examples_are_one_too_many():
    with pytest.raises(EnvironmentLoadError) as refused:
        DataAndDraw.from_settings({}).examples(Split.EVAL)
    assert all(place in str(refused.value) for place in (" data ", "DataAndDraw.draw"))


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


class ReleasesNothing(Fine):
    def __init__(self, config=None):
        super().__init__(config)
        self.on_close(None)


class RaisesRange(Fine):
    @property
    def reward_max(self):
        raise KeyError("scale")


class OneTool(ToolEnvironment):
    data = ("a", "b")
    right = Fine.right

    def tools(self):
        return len


class ToolsRaise(ToolEnvironment):
    data = ("a", "b")
    right = Fine.right

    def tools(self):
        return [os.environ["NO_SUCH_ADDRESS"]]


class ToolsExit(ToolsRaise):
    def tools(self):
        raise SystemExit(2)


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
        (ReleasesNothing, "on_close takes a function without arguments, got None"),
        (RaisesRange, "reward_max raised KeyError: 'scale' ("),
        (OneTool, "OneTool.tools ({}) must return a list of functions and McpServers, got"),
        (ToolsRaise, "ToolsRaise.tools ({}) raised KeyError: 'NO_SUCH_ADDRESS' ({}); there is no "),
        (ToolsRaise, "declare it by secrets = ('NO_SUCH_ADDRESS',), because"),
        (ToolsExit, "ToolsExit.tools ({}): sys.exit(2) was called"),
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


def test_the_usual_classes_are_built():
    assert Fine.from_settings({}).config == EnvironmentConfig()
    assert isinstance(Fine(), Environment)
