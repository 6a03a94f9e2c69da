"""What a checkpoint holds of the sampler: every token once, and everything exactly as it was."""

import random
import shutil
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.base.chains import ChainRecorder, Routes, chains_of
from telescope_core.errors import ConfigError
from telescope_core.types import (
    Completion,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    StopReason,
    ToolCall,
    Turn,
    TurnInfo,
)
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.checkpoints.sampler_state import read_sampler_state, write_sampler_state
from telescope_train.rollouts.failures import Boundary
from telescope_train.rollouts.sampled import SampledBatch, SamplerState

SAID = Message(role="assistant", content="hi")
ASKED = Message(role="user", content="2+2=")
FORMAT_1 = Path(__file__).with_name("sampler-format-1.json")


def turn(tokens, temperature=1.0) -> Turn:
    completion = Completion(
        message=SAID,
        finish_reason="stop",
        tokens=tokens,
        oldest_version=1,
        newest_version=2,
        num_prompt_tokens=tokens.prompt_end,
        num_completion_tokens=tokens.num_completion_ids,
    )
    return Turn(completion=completion, started_s=1.0, ended_s=2.5, temperature=temperature)


def rollout(*turns, index=0, **fields) -> Rollout:
    return Rollout(
        environment="math", example_id="e1", group_id="4.0", index=index, turns=turns, **fields
    )


def state_of(*rollouts, **fields) -> SamplerState:
    group = Group(id="4.0", environment="math", example_id="e1", rollouts=rollouts)
    batch = SampledBatch(groups=(group,), duration_s=3.5, **fields)
    return SamplerState(next_batch=5, draw_position=17, batches={4: batch})


def saved_and_read(folder, state):
    write_sampler_state(folder, state)
    return read_sampler_state(folder)


def the_rollout(state) -> Rollout:
    return state.batches[4].groups[0].rollouts[0]


def routes_of(number, num_tokens) -> Routes:
    """Routes of 1 layer with 2 experts that name the request and the token."""
    numbers = [one for token in range(num_tokens) for one in (number, token)]
    return Routes(experts=array("h", numbers).tobytes(), num_layers=1, num_chosen=2)


def test_everything_comes_back(tmp_path):
    recorder = ChainRecorder()
    calls = (ToolCall(id="c", name="add", arguments="{}"),)
    kept = rollout(
        turn(recorder.record([1, 2], [3, 4], [-0.5, -0.25])),
        turn(recorder.record([1, 2, 3, 4, 5], [6], [-1.0])),
        turn(recorder.record([1, 7], [8], [-2.0])),
        messages=(ASKED, replace(SAID, tool_calls=calls)),
        reward=1.0,
        rewards={"correct": 1.0},
        info=(TurnInfo(turn=0, key="k", value="v"),),
    )
    failed = rollout(
        index=1, status=RolloutStatus.FAILED, error="gone", stop_reason=StopReason.ERROR
    )
    before = rollout(turn(recorder.record([1, 2], [9], [-0.5])), status=RolloutStatus.FAILED)
    state = state_of(
        kept,
        replace(failed, attempt=2),
        replaced=(replace(before, index=1),),
        failed_attempts={Boundary.ENVIRONMENT: 2},
    )
    found = saved_and_read(tmp_path, state)
    assert found == state
    chains = chains_of(one.completion.tokens for one in the_rollout(found).turns)
    assert [chain.num_shared for chain in chains] == [0, 1]
    assert chains[1].parent is chains[0]


def test_numbers_of_numpy_and_numbers_that_are_not_finite_come_back(tmp_path):
    odd = {"a": np.float64(0.5), "b": np.float32(0.25), "c": np.int64(3), "d": float("inf")}
    found = saved_and_read(tmp_path, state_of(rollout(metrics=odd, reward=0.0)))
    assert the_rollout(found).metrics == {"a": 0.5, "b": 0.25, "c": 3.0, "d": float("inf")}


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_rollouts_give_the_same_samples_after_a_restore(tmp_path_factory, data):
    few, is_mixture = st.lists(st.integers(0, 2), min_size=1, max_size=3), data.draw(st.booleans())
    recorder, known, turns = ChainRecorder(), [[1]], []
    for number in range(data.draw(st.integers(1, 6))):
        context = data.draw(st.sampled_from(known))
        prompt = [*context[: data.draw(st.integers(1, len(context)))], *data.draw(few)]
        said, temperature = data.draw(few), data.draw(st.sampled_from([1.0, 0.5]))
        logprobs = [-number - at / 8 for at in range(len(said))]
        routes = routes_of(number, len(prompt) + len(said) - 1) if is_mixture else None
        place = recorder.record(prompt, said, logprobs, temperature=temperature, routes=routes)
        turns.append(turn(place, temperature))
        known.append([*prompt, *said])
    state = state_of(rollout(*turns))
    found = saved_and_read(tmp_path_factory.mktemp("state"), state)
    assert found == state
    before = samples_from_rollout(the_rollout(state), 0.5, 1.0)
    after = samples_from_rollout(the_rollout(found), 0.5, 1.0)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.behavior_logprobs, other.behavior_logprobs)
        assert (one.routes is not None) == is_mixture
        if is_mixture:
            np.testing.assert_array_equal(one.routes, other.routes)


def test_a_rollout_that_goes_on_after_a_restore_keeps_its_routes(tmp_path):
    recorder = ChainRecorder()
    first = turn(recorder.record([1, 2], [3, 4], [-1.0, -1.0], routes=routes_of(0, 3)))
    found = the_rollout(saved_and_read(tmp_path, state_of(rollout(first))))
    chain = found.turns[0].completion.tokens.chain
    chain.own_ids.extend([5, 6])
    chain.learn_routes(routes_of(7, 5))
    numbers = array("h", chain.routes_until(6).experts)
    assert numbers[::2].tolist() == [0, 0, 0, 7, 7, -1]


def test_a_long_rollout_takes_the_size_of_its_tokens_once(tmp_path):
    """Measure: bytes of the file for 40 turns of 32k tokens, against 4 + 4 bytes for each token."""
    drawn, recorder, known = random.Random(0), ChainRecorder(), array("i")
    turns = []
    for _ in range(40):
        known += array("i", drawn.choices(range(150_000), k=409))
        said = array("i", drawn.choices(range(150_000), k=409))
        turns.append(turn(recorder.record(known, said, [-drawn.random() for _ in said])))
        known = known + said
    assert len(known) > 32_000
    write_sampler_state(tmp_path, state_of(rollout(*turns)))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 1.2 * 8 * len(known)


def test_the_state_of_an_earlier_version_is_read_into_chains(tmp_path):
    shutil.copy(FORMAT_1, tmp_path / "sampler.json")
    found = read_sampler_state(tmp_path)
    first, second, third = (one.completion.tokens for one in the_rollout(found).turns)
    assert first.chain is second.chain
    assert third.chain.parent is first.chain
    assert second.prompt_ids == array("i", [1, 2, 3, 4, 5])
    assert second.logprobs == array("f", [-1.0])
    assert found.batches[4].failed_attempts == {Boundary.ENVIRONMENT: 2}
    assert found.batches[4].groups[0].rollouts[1].status is RolloutStatus.FAILED
    assert (found.next_batch, found.draw_position) == (5, 17)
    (tmp_path / "new").mkdir()
    assert saved_and_read(tmp_path / "new", found) == found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sampler.msgpack", b"\x82"),
        ("sampler.msgpack", b"\x80"),
        ("sampler.json", b'{"batches": 1'),
        ("sampler.json", b'{"batches": {}}'),
        ("sampler.json", b'{"batches": {"4": {}}}'),
    ],
)
def test_a_state_that_cannot_be_read_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_sampler_state(tmp_path)
    assert (tmp_path / name).read_bytes() == content


def test_a_state_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"sampler\.msgpack"):
        read_sampler_state(tmp_path)
