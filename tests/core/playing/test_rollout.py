"""What happens around the turns: where code runs, setup, stop and cleanup, failures."""

import asyncio
import subprocess
import threading
import time
from types import FunctionType

import pytest
from tests.asking import ask
from tests.core.one_rollout import One, let_time_pass, play

from telescope_core import (
    Example,
    ListSource,
    Message,
    MultiTurnEnvironment,
    RolloutStatus,
    StopReason,
    cleanup,
    metric,
    reward,
    runs_in,
    setup,
    stop,
)
from telescope_core.environments.loop_watch import LoopWatch
from telescope_core.errors import ContextLengthError, EndpointError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.types import MetricRange, Sampling, TurnInfo


class Talk(MultiTurnEnvironment):
    max_turns = 4

    def examples(self, split):
        return ListSource([Example(id="talk", prompt="go")])

    def env_response(self, messages, episode):
        return f"turn {len(episode.turns)}"


class Asks:
    """A policy that keeps how it was sampled."""

    endpoint = None

    def __init__(self):
        self.sampled = []

    async def complete(self, messages, sampling, *, tools=()):
        self.sampled.append(sampling)
        return await ScriptedClient(["yes"]).policy("r").complete(messages, sampling)


class Everywhere(MultiTurnEnvironment):
    """Sync and async methods of every kind; notes the thread each one runs in."""

    max_turns = 2

    def __init__(self, config=None):
        super().__init__(config)
        self.threads = {}

    def here(self, name):
        self.threads[name] = threading.get_ident()

    def examples(self, split):
        self.here("examples")
        return ListSource([Example(id="e", prompt="p")])

    def format_prompt(self, example):
        self.here("format_prompt")
        return [Message(role="user", content="asked")]

    def env_response(self, messages, episode):
        self.here("env_response")
        return "more"

    @setup
    def prepare(self, episode):
        self.here("setup")

    @setup
    async def prepare_more(self, episode):
        self.here("async")

    @stop
    @runs_in("loop")
    def never(self, episode):
        self.here("loop")
        return False

    @cleanup
    def tidy(self, episode):
        self.here("cleanup")

    @reward
    def paid(self, rollout, example):
        self.here("reward")
        return 1

    def compute_reward(self, rollout, example):
        self.here("compute_reward")
        return rollout.rewards["paid"]


async def test_sync_methods_run_in_threads_and_async_ones_on_the_loop():
    environment = Everywhere()
    rollout = await play(environment)
    assert rollout.reward == 1.0
    here = threading.get_ident()
    on_loop = {name for name, thread in environment.threads.items() if thread == here}
    assert on_loop == {"async", "loop"}
    assert len(environment.threads) == 9


class OnTheLoop(Everywhere):
    sync_runs_in = "loop"


async def test_a_class_may_declare_that_its_sync_methods_are_quick():
    environment = OnTheLoop()
    await play(environment)
    on_loop = {n for n, thread in environment.threads.items() if thread == threading.get_ident()}
    assert on_loop == set(environment.threads) - {"examples"}


async def test_a_slow_sync_method_does_not_hold_up_the_others():
    everyone_waits = threading.Barrier(8, timeout=60)

    class Meet(One):
        max_threads = 8

        @reward
        def together(self, rollout, example):
            everyone_waits.wait()
            return 1.0

    client = InProcessEnvironment(Meet(), name="it")
    script = ScriptedClient(["yes"])
    rollouts = await asyncio.gather(
        *(client.play(ask(group_id=f"{i}"), script.policy("r")) for i in range(8))
    )
    await client.close()
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8


async def test_threads_that_hang_are_replaced():
    release, loop = threading.Event(), asyncio.get_running_loop()

    class Hang(One):
        max_threads = 1

        @reward
        def stuck(self, rollout, example):
            if example.id == "one":
                loop.call_soon_threadsafe(let_time_pass)
                release.wait()
            return 1.0

        def examples(self, split):
            return ListSource([Example(id=name, prompt="") for name in ("one", "two")])

    environment = Hang()
    client = InProcessEnvironment(environment, name="it")
    policy = ScriptedClient(["yes"]).policy("r")
    first = await client.play(ask(example_index=0, deadline_s=60), policy)
    assert first.stop_reason is StopReason.TIMEOUT
    second = await client.play(ask(example_index=1, deadline_s=60), policy)
    assert second.reward == 1.0
    release.set()
    await client.close()


class Hooked(Talk):
    """Records what is called, in order."""

    def __init__(self, config=None):
        super().__init__(config)
        self.calls = []

    @setup
    async def open_one(self, episode):
        self.calls.append("open one")
        episode.state["rows"] = 0

    @setup
    def open_two(self, episode):
        self.calls.append("open two")
        episode.add(Message(role="user", content="and then"))

    @cleanup
    async def close_one(self, episode):
        self.calls.append("close one")

    @cleanup(deadline_s=0.05)
    async def close_two(self, episode):
        self.calls.append("close two")
        await asyncio.sleep(30)

    @reward
    def done(self, rollout, example, episode):
        return float(episode.state["rows"] == 0 and len(rollout.turns) == 4)


async def test_setups_run_in_order_and_cleanups_once_in_reverse_with_their_own_deadline():
    environment = Hooked()
    rollout = await play(environment)
    assert environment.calls == ["open one", "open two", "close two", "close one"]
    assert rollout.messages[1].content == "and then"
    assert rollout.reward == 1.0
    assert rollout.tags["cleanup"] == "cleanup close_two did not end within 0.05 s"


class Ends(Hooked):
    how = ""

    @cleanup
    def close_two(self, episode):
        self.calls.append("close two")
        raise OSError("already gone")

    async def env_response(self, messages, episode):
        if self.how == "error":
            raise LookupError("no such room")
        if self.how == "timeout":
            let_time_pass()
        await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["error", "timeout", "cancel", "close"])
async def test_cleanups_run_however_the_rollout_ends(how):
    environment = Ends()
    environment.how = how
    client = InProcessEnvironment(environment, name="it")
    asked = asyncio.Event()

    def reply(messages):
        asked.set()
        return "yes"

    policy = ScriptedClient(reply).policy("r")
    task = asyncio.create_task(client.play(ask(deadline_s=60.0), policy))
    await asked.wait()
    if how == "cancel":
        await client.cancel("g/0")
    if how == "close":
        await client.close()
    rollout = await task
    await client.close()
    assert environment.calls == ["open one", "open two", "close two", "close one"]
    assert rollout.reward is None
    expected = {"error": "failed", "timeout": "failed", "cancel": "cancelled", "close": "cancelled"}
    assert rollout.status == expected[how]
    if how == "error":
        assert rollout.error is not None
        assert rollout.error.startswith("LookupError: no such room (in play ")
        assert "Ends.env_response (" in rollout.error
        assert "test_rollout.py:" in rollout.error
        assert rollout.tags["cleanup"] == "cleanup close_two raised OSError: already gone"


async def test_a_cleanup_is_not_cut_short_by_a_second_cancel():
    waiting, begun, ended = asyncio.Event(), asyncio.Event(), []

    class Slow(Talk):
        @cleanup
        async def tidy(self, episode):
            begun.set()
            await asyncio.sleep(0.05)
            ended.append(episode.example.id)

        async def env_response(self, messages, episode):
            waiting.set()
            await asyncio.Event().wait()

    client = InProcessEnvironment(Slow(), name="it")
    task = asyncio.create_task(client.play(ask(), ScriptedClient(["yes"]).policy("r")))
    await waiting.wait()
    task.cancel()
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    assert ended == ["talk"]


async def test_a_failing_setup_is_a_failed_rollout_and_is_cleaned_up():
    class NoRoom(Hooked):
        @setup
        def open_two(self, episode):
            raise OSError("no room")

    environment = NoRoom()
    rollout = await play(environment)
    assert rollout.status is RolloutStatus.FAILED
    assert environment.calls[-1] == "close one"


class Stops(Talk):
    @stop
    def said_stop(self, episode):
        return "stop" in episode.messages[-1].content

    @reward
    def turns(self, rollout, example):
        return len(rollout.turns) / 4


async def test_a_stop_ends_the_rollout_before_the_environment_answers():
    rollout = await play(Stops(), ["hello", "stop", "never said"])
    assert rollout.stop_reason is StopReason.COMPLETED
    assert rollout.tags["stopped_by"] == "said_stop"
    assert rollout.messages[-1].content == "stop"
    assert rollout.reward == 0.5


async def test_a_stop_is_asked_about_the_environments_answer_too():
    class Answers(Stops):
        def env_response(self, messages, episode):
            return "stop now"

    rollout = await play(Answers(), ["hello"])
    assert [message.content for message in rollout.messages] == ["go", "hello", "stop now"]


async def test_a_stop_ends_a_play_of_ones_own_that_asks_in_parallel():
    class Parallel(Stops):
        async def play(self, episode):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(episode.generate())
            return StopReason.MAX_TURNS

    rollout = await play(Parallel(), ["stop"])
    assert rollout.status is RolloutStatus.KEPT
    assert rollout.stop_reason is StopReason.COMPLETED


class Noted(Talk):
    def env_response(self, messages, episode):
        episode.note("stderr", f"warning {len(episode.turns)}", kind="stderr")
        episode.tags["room"] = "blue"
        episode.metrics["steps"] = len(episode.turns)
        episode.metrics["late"] = len(episode.turns) > 1
        return None if len(episode.turns) == 2 else "go on"

    def golden_answers(self, example):
        return {"route": "north"}

    @metric(low=0, lower_is_better=True)
    def cost(self, rollout, example, episode):
        episode.metrics |= {"cost": 7, "asked": 2}
        return 3

    @reward
    def fine(self, rollout, example, episode):
        episode.metrics["steps"] += 0.5
        episode.tags["room"] += " and red"
        episode.note("graded", "well")
        return True

    @cleanup
    def leave(self, episode):
        episode.metrics["seconds"] = 4
        episode.tags["left"] = "the room"
        episode.note("left", "at once")


async def test_notes_tags_metrics_and_golden_answers_are_recorded():
    client = InProcessEnvironment(Noted(), name="it")
    assert (await client.describe()).metrics == {"cost": MetricRange(low=0, lower_is_better=True)}
    rollout = await client.play(ask(), ScriptedClient(["a"]).policy("r"))
    await client.close()
    assert rollout.info == (
        TurnInfo(turn=0, key="stderr", value="warning 1", kind="stderr"),
        TurnInfo(turn=1, key="stderr", value="warning 2", kind="stderr"),
        TurnInfo(turn=1, key="graded", value="well", kind="text"),
        TurnInfo(turn=1, key="left", value="at once", kind="text"),
    )
    assert rollout.tags == {"room": "blue and red", "left": "the room"}
    expected = {"steps": 2.5, "late": 1.0, "cost": 3.0, "asked": 2.0, "seconds": 4.0}
    assert rollout.metrics == expected
    assert {type(value) for value in rollout.metrics.values()} == {float}
    assert rollout.golden_answers == {"route": "north"}


class LeavesNan(One):
    @cleanup
    def leave(self, episode):
        episode.metrics |= {"nan": float("nan"), "seconds": 4}


async def test_a_metric_of_a_cleanup_that_is_no_number_changes_nothing_but_its_tag():
    rollout = await play(LeavesNan())
    assert (rollout.status, rollout.metrics) == (RolloutStatus.KEPT, {"seconds": 4.0})
    assert "LeavesNan.leave (" in rollout.tags["cleanup"]
    assert "episode.metrics['nan'] must be a finite number" in rollout.tags["cleanup"]


BLOCKED_S = (0.35, 3.0, 20.0)
"""How long code blocks the loop until that is noticed; a busy machine may look late."""


class Blocks(One):
    """Holds up the loop for a while."""

    blocked_s = 0.0

    def hold_up(self) -> None:
        time.sleep(self.blocked_s)

    @reward
    async def slow(self, rollout, example):
        self.hold_up()
        return 1.0


async def warning_of(caplog, environment: Blocks) -> str:
    """Return what is logged of the environment that blocks the loop."""
    for environment.blocked_s in BLOCKED_S:
        with caplog.at_level("WARNING"):
            await play(environment)
        warnings = [record.getMessage() for record in caplog.records]
        found = [one for one in warnings if one.startswith(("slow (", "hold_up ("))]
        if found:
            return found[0]
    raise AssertionError("nothing was noticed")


@pytest.mark.slow
async def test_a_blocked_loop_is_noticed_and_the_culprit_named(caplog):
    warning = await warning_of(caplog, Blocks())
    assert warning.startswith("hold_up (")
    assert "test_rollout.py:" in warning
    assert "time.sleep(self.blocked_s)" in warning


@pytest.mark.slow
async def test_what_blocks_deep_inside_a_library_is_told_in_a_few_lines(caplog):
    class Waits(Blocks):
        def hold_up(self) -> None:
            subprocess.run(["sleep", str(self.blocked_s)], check=True)

    _, *calls = (await warning_of(caplog, Waits())).splitlines()
    assert 1 < len(calls) <= 5
    assert 'in hold_up: subprocess.run(["sleep"' in calls[0]
    assert "subprocess.py" in calls[-1]


@pytest.mark.slow
async def test_a_loop_with_too_much_to_do_accuses_nobody():
    async def short():
        time.sleep(0.001)  # noqa: ASYNC251

    for _ in range(3):
        blocks = []
        watch = LoopWatch(threshold_s=0.3, on_block=blocks.append)
        watch.start()
        await asyncio.sleep(0)
        await asyncio.gather(*(short() for _ in range(600)))
        await asyncio.sleep(0.1)
        watch.stop()
        assert watch.longest_s > 0.3
        if not blocks:
            break  # A machine that is busy elsewhere may stop even what takes a millisecond.
    assert blocks == []


@pytest.mark.slow
async def test_code_without_line_numbers_is_named_by_its_first_line():
    def spin(blocked_s: float) -> None:
        time.sleep(blocked_s)

    no_lines = FunctionType(spin.__code__.replace(co_linetable=b""), {"time": time})
    for blocked_s in BLOCKED_S:
        blocks = []
        watch = LoopWatch(threshold_s=0.1, on_block=blocks.append)
        watch.start()
        await asyncio.sleep(0)
        no_lines(blocked_s)
        await asyncio.sleep(0)
        watch.stop()
        if blocks:
            break
    assert blocks[0].culprit.startswith("spin (")
    assert blocks[0].culprit.endswith(f":{spin.__code__.co_firstlineno})")


@pytest.mark.slow
async def test_a_loop_that_is_only_busy_awaiting_is_not_accused():
    blocks = []
    watch = LoopWatch(threshold_s=0.05, on_block=blocks.append)
    watch.start()
    watch.start()
    await asyncio.sleep(0.2)
    watch.stop()
    watch.stop()
    assert blocks == []


@pytest.mark.slow
async def test_a_loop_that_waits_longer_than_it_meant_to_accuses_nobody(monkeypatch):
    """As on a machine that does not go on with its thread: whoever runs the loop is no culprit."""
    selector = asyncio.get_running_loop()._selector
    select = selector.select

    def select_late(timeout=None):
        time.sleep(0.3)
        return select(timeout)

    blocks = []
    watch = LoopWatch(threshold_s=0.05, on_block=blocks.append)
    watch.start()
    monkeypatch.setattr(selector, "select", select_late)
    await asyncio.sleep(0.1)
    monkeypatch.undo()
    watch.stop()
    assert watch.longest_s > 0.2
    assert blocks == []


@pytest.mark.parametrize(
    ("error", "replies", "writer"),
    [
        (ContextLengthError("max_model_len is 8"), [], "Lengthy.format_prompt (tests"),
        (EndpointError("answered 400: maximum context length is 8"), ["yes"], "Talk.env_resp"),
        (EndpointError("answered 500: busy"), [], ""),
    ],
)
async def test_a_prompt_that_is_too_long_names_what_wrote_it(error, replies, writer):
    hint = "(example 'talk'; to make it shorter, look at"

    class Lengthy(Talk):
        def format_prompt(self, example):
            return "go " * 9

    rollout = await play(Lengthy(), [*replies, error])
    if replies:
        # A later turn that does not fit is a limit, not a failure.
        assert rollout.error is None
        assert rollout.info[-1].value.startswith(f"{error} {hint} {writer}")
        return
    assert rollout.error is not None
    assert rollout.error.startswith(f"{type(error).__name__}: {error}")
    assert (hint in rollout.error) is bool(writer)
    assert writer in rollout.error


async def test_a_turn_ends_at_stop_texts_of_its_own():
    class Stops(One):
        async def play(self, episode):
            await episode.generate(stop=["Q:", "A:"])
            await episode.generate()

    policy = Asks()
    request = ask(sampling=Sampling(max_tokens=8, stop=("A:",), include_stop_str_in_output=True))
    rollout = await InProcessEnvironment(Stops(), name="stops").play(request, policy)
    assert rollout.error is None
    first, second = policy.sampled
    assert (first.stop, first.include_stop_str_in_output) == (("A:", "Q:"), False)
    assert second == request.sampling
