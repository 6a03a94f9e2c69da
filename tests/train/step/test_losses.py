"""What a run loses is told once for each cause, and in its summary."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.rows import row_of
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_core.types import Group, Rollout, RolloutStatus, StopReason
from telescope_train.observability.terminal import print_summary
from telescope_train.rollouts.failures import Boundary, boundary_of
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.losses import NUM_FEW_STEPS, Losses, losses_of
from telescope_train.step.metrics import rollout_metrics

KEPT = Rollout(environment="toy", example_id="x", group_id="0.0-1", index=0, reward=1.0)
TOO_LONG = replace(
    KEPT,
    status=RolloutStatus.FAILED,
    reward=None,
    status_reason="ContextLengthError",
    stop_reason=StopReason.CONTEXT_LENGTH,
    error="ContextLengthError: a prompt of 423 tokens,\nbut max_model_len is 256; "
    "raise max_model_len",
)
BROKEN = replace(
    TOO_LONG,
    stop_reason=StopReason.ERROR,
    status_reason="ZeroDivisionError",
    error="ZeroDivisionError: [/red] there is nothing",
    tags={"failed_in": "reward"},
)


def batch(*rollouts: Rollout, replaced: tuple[Rollout, ...] = ()) -> SampledBatch:
    group = Group(id="0.0-1", environment="toy", example_id="x", rollouts=rollouts)
    return SampledBatch(groups=(group,), replaced=replaced, duration_s=1.0)


def test_each_cause_is_told_once_with_the_error_and_what_to_do():
    told: list[str] = []
    losses = Losses(told.append)
    losses.note(4, batch(KEPT, KEPT), {})
    assert told == []
    losses.note(5, batch(KEPT, TOO_LONG, TOO_LONG, replaced=(BROKEN,)), {})
    losses.note(6, batch(TOO_LONG, BROKEN), {})
    assert len(told) == 2
    assert "step 5: 2 failed attempts at the 3 rollouts" in told[0]
    assert "a prompt of 423 tokens, but max_model_len is 256" in told[0]
    assert "256; raise max_model_len; or leave out examples with long prompts." in told[0]
    assert "step 5: 1 failed attempt" in told[1]
    assert "ZeroDivisionError: [/red]" in told[1]
    assert "correct the reward" in told[1]


def few(step: int) -> dict[str, float]:
    return {"groups/total": 4.0, "groups/discarded": 3.0, "groups/all_equal": 3.0, "step": step}


def test_a_run_that_trains_on_few_groups_says_so_once_after_some_steps():
    told: list[str] = []
    losses = Losses(told.append)
    half = {"groups/total": 4.0, "groups/discarded": 2.0}
    for step, row in enumerate([few(1), few(2), half, few(4), few(5)], start=1):
        losses.note(step, batch(KEPT), row)
    assert told == []
    for step in range(6, 12):
        losses.note(step, batch(KEPT), few(step))
    assert len(told) == 1
    assert f"trained on {NUM_FEW_STEPS} of {4 * NUM_FEW_STEPS} groups" in told[0]
    assert len(losses._few) == NUM_FEW_STEPS, "a long run keeps no row of each such step"


def test_prompts_that_are_too_long_count_as_such():
    metrics = rollout_metrics([KEPT, TOO_LONG, TOO_LONG])
    assert metrics["rollouts/out_of_context"] == 2.0
    assert metrics["rollouts/failed"] == 2.0
    assert boundary_of(TOO_LONG) is Boundary.CONTEXT_LENGTH
    assert boundary_of(BROKEN) is Boundary.REWARD


def row(step: int, **metrics: float) -> dict[str, float]:
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "groups/total": 4.0, **names}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", name="toy", config={})


def test_the_summary_of_a_run_counts_what_was_lost(folder):
    for step, rollouts in ((1, [KEPT]), (2, [TOO_LONG, TOO_LONG, BROKEN])):
        rows = [row_of(replace(one, index=i)) for i, one in enumerate(rollouts)]
        folder.write_rollouts(step, rows)
    point = EvalPoint(
        time_s=0.0, name="e", tag="step-2", version=2, state=EvalPointState.SKIPPED, reason="late"
    )
    folder.log_eval_point(point)
    lost = losses_of(
        folder,
        [
            row(1, rollouts__total=1, workers__toy__restarts=2, requests__sent_again=3),
            row(
                2,
                rollouts__total=3,
                rollouts__failed=3,
                rollouts__failed_attempts=5,
                failures__context_length=2,
                failures__reward=3,
                groups__discarded=3,
                workers__toy__restarts=1,
            ),
        ],
    )
    assert (lost["rollouts"], lost["rollouts_failed"], lost["attempts_failed"]) == (4, 3, 5)
    assert lost["causes"] == {"context_length": 2, "reward": 3}
    assert lost["most_frequent_error"].startswith("ContextLengthError: a prompt of 423 tokens")
    assert "correct the reward" in lost["remedy"]
    assert (lost["groups"], lost["groups_left_out"]) == (8, 3)
    # The counter began anew after a resume.
    assert lost["workers_replaced"] == 3
    assert (lost["requests_sent_again"], lost["evals_without_result"]) == (3, 1)
    shown = io.StringIO()
    console = Console(file=shown, width=80)
    print_summary({"name": "toy", "losses": lost}, console=console)
    for text in ("3 of 4 rollouts failed", "most often: ContextLengthError", "3 of 8 groups"):
        assert text in shown.getvalue()


@pytest.mark.parametrize("count", [1, 2])
def test_the_summary_names_lost_servers_and_counts_in_words(folder, count):
    for life in range(1, count + 1):
        for state in (ServerState.STARTING, ServerState.SERVING, ServerState.LOST):
            folder.log_server(
                ServerEvent(
                    time_s=1.0,
                    server="http://a",
                    role=ServerRole.ROLLOUT,
                    life=life,
                    state=state,
                    version=1,
                )
            )
    rows = [row(1, workers__toy__restarts=count, requests__sent_again=count)]
    lost = losses_of(folder, rows) | {"groups_left_out": count, "evals_without_result": count}
    assert lost["servers_lost"] == count
    shown = io.StringIO()
    print_summary({"name": "toy", "losses": lost}, console=Console(file=shown, width=80))
    one = [
        "1 of 4 groups was not trained on",
        "1 environment worker was replaced",
        "1 inference server was lost; see servers.jsonl",
        "1 request was sent again",
        "1 eval has no result; see eval_points.jsonl",
    ]
    several = [
        "2 of 4 groups were not trained on",
        "2 environment workers were replaced",
        "2 inference servers were lost; see servers.jsonl",
        "2 requests were sent again",
        "2 evals have no result; see eval_points.jsonl",
    ]
    assert shown.getvalue().splitlines()[2:] == (one if count == 1 else several)


def test_a_run_that_lost_nothing_says_nothing_of_it(folder):
    lost = losses_of(folder, [row(1, rollouts__total=4, rollouts__failed=0)])
    shown = io.StringIO()
    print_summary({"name": "toy", "losses": lost}, console=Console(file=shown, width=80))
    assert shown.getvalue().split() == ["run", "toy", "finished"]
