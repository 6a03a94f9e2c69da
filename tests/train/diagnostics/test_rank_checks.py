"""What is proved before training: each proof passes on a sound run and stops a broken one."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.types import Completion, Message, Sampling
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import AlgorithmSection
from telescope_train.diagnostics.engine_check import UpdateCheck, check_engine
from telescope_train.diagnostics.rank_checks import SelfTest, Tolerance, check_rank
from telescope_train.models.tiny import make_tiny_model
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import VOCAB, backend_settings, grpo_batches

PACKING = Packing(seq_len=64, num_ranks=1, hidden_size=128, max_tokens=8)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)
    penalized = AlgorithmSection(kl_penalty_tau=0.1)
    worker = TrainerWorker(replace(backend_settings(model), algorithm=penalized))
    yield worker
    worker.close()


def check(backend):
    return check_rank(
        backend,
        vocab_size=VOCAB,
        tolerance=Tolerance.from_dtype("float32"),
        exactness=0.0,
        reference_exactness=0.0,
        shares_prefixes=True,
    )


@pytest.mark.slow
def test_a_rank_proves_five_things_exactly(worker):
    tests = {test.name: test for test in check(worker.backend)}
    assert tests["packing does not leak"].value < 1e-5
    assert tests["shared prefixes change nothing"].value < 1e-5
    assert tests["importance weight is 1"].value == 0
    assert tests["reference is the policy at its start"].value == 0
    assert tests["learning rate 0 does not drift"].value == 0
    assert [test.name for test in worker.self_tests] == list(tests)


@pytest.mark.slow
def test_rehearsing_leaves_nothing_behind(worker):
    weights = {name: value.clone() for name, value in worker.export_weights()}
    check(worker.backend)
    assert all((value == weights[name]).all() for name, value in worker.export_weights())
    assert not worker.backend._optimizer.state
    assert worker.backend._progress.step == 0
    assert all(parameter.grad is None for parameter in worker.backend._policy.parameters())


def failed(backend) -> str:
    """Return the first two words of the test that stops the run."""
    with pytest.raises(ConfigError) as caught:
        check(backend)
    name = re.search("self-test '(.*?)'", str(caught.value))
    assert name is not None, caught.value
    return " ".join(name[1].split()[:2])


class Broken:
    """A backend with one thing wrong."""

    def __init__(self, backend, **wrong) -> None:
        self._backend, self._wrong = backend, wrong

    def __getattr__(self, name):
        return self._wrong.get(name) or getattr(self._backend, name)


def test_prefixes_that_are_not_attended_to_are_caught(worker):
    def of_other_prefixes(batches):
        return worker.backend.logprobs([with_other_prefix(batch) for batch in batches])

    def with_other_prefix(batch):
        if batch.shared_S is None:
            return batch
        is_shared_T = batch.positions_T < np.repeat(batch.shared_S, batch.lengths_S)
        other_T = np.where(is_shared_T, (batch.token_ids_T + 1) % VOCAB, batch.token_ids_T)
        return replace(batch, token_ids_T=other_T, shared_S=None)

    assert failed(Broken(worker.backend, logprobs=of_other_prefixes)) == "shared prefixes"


def test_a_forward_pass_that_differs_from_itself_is_caught(worker):
    def noisy(batches):
        return [found + np.float32(1e-6) for found in worker.backend.logprobs(batches)]

    assert failed(Broken(worker.backend, logprobs=noisy)) == "importance weight"
    worker.backend.rehearse_step()


def test_a_reference_that_is_another_model_is_caught(worker):
    with worker.backend._reference.ready() as reference:
        first = next(reference.parameters())
        before = first.detach().clone()
        first.data.mul_(1 + 1e-3)
    try:
        assert failed(worker.backend) == "reference is"
    finally:
        first.data.copy_(before)


def test_an_optimizer_that_moves_weights_at_rate_0_is_caught(worker):
    optimizer = worker.backend._optimizer
    step = optimizer.step

    def drifting():
        step()
        optimizer.param_groups[0]["params"][0].data.mul_(1 + 1e-6)

    weights = worker.backend._optimizer.param_groups[0]["params"][0].detach().clone()
    optimizer.step = drifting
    try:
        assert failed(worker.backend) == "learning rate"
    finally:
        optimizer.step = step
        optimizer.param_groups[0]["params"][0].data.copy_(weights)


class FromTheTrainer:
    """A policy that answers with one sample of a batch, scored by the trainer, off by `error`."""

    def __init__(self, worker, error: float) -> None:
        (batch,) = grpo_batches(seq_len=4096)[0]
        (logprobs_T,) = worker.logprobs([batch])
        here = batch.sequence_ids_T == 0
        first = int(np.flatnonzero(batch.mask_T[here])[0])
        ids = batch.token_ids_T[here].tolist()
        self.temperature = float(batch.temperatures_T[here][0])
        self.answer = Completion(
            message=Message(role="assistant", content=""),
            finish_reason="stop",
            tokens=sampled_tokens(ids[:first], ids[first:], logprobs_T[here][first:] + error),
        )

    def policy(self, rollout_id, sampling=None):
        return self

    async def complete(self, messages, sampling, *, tools=()):
        return self.answer


@pytest.mark.parametrize("error", [0.0, 0.01])
async def test_engine_and_trainer_are_compared_through_the_policy(worker, error):
    policies = FromTheTrainer(worker, error)
    sampling = {"toy": Sampling(max_tokens=64, temperature=policies.temperature)}

    async def logprobs(shards):
        return [worker.logprobs(shards[0])]

    asked = check_engine(policies, sampling, PACKING, logprobs, dtype="float32")
    if error:
        with pytest.raises(ConfigError, match=r"0\.001 nats.*0\.01"):
            await asked
    else:
        assert (await asked).value < 1e-5


def agreement(value: float, limit: float) -> SelfTest:
    return SelfTest(name="agree", value=value, limit=limit, unit="nats on average", remedy="none")


def test_an_engine_that_loads_an_update_wrongly_ends_the_run_at_the_first_tokens_of_it():
    check = UpdateCheck(agreement(1e-6, 1e-3), 4, is_exact=True)
    check.note(5, {"mismatch/mean": 0.1})  # of the weights that the self-test has seen
    check.note(6, {"reward": 1.0})  # a batch of older weights alone
    with pytest.raises(ConfigError, match=r"by 0\.1 nats on average, and before it by 1e-06"):
        check.note(7, {"mismatch/mean": 0.1})
    with pytest.raises(ConfigError, match="nan nats"):
        UpdateCheck(agreement(1e-6, 1e-3), 0, is_exact=True).note(
            2, {"mismatch/mean": float("nan")}
        )


def test_longer_answers_and_coarse_types_may_differ_more_than_the_self_test_found():
    for value, limit, found in ((1e-6, 1e-3, 2e-3), (0.02, 0.05, 0.14), (0.2, 0.3, 1.9)):
        UpdateCheck(agreement(value, limit), 0, is_exact=True).note(2, {"mismatch/mean": found})
    UpdateCheck(agreement(1e-6, 1e-3), 0, is_exact=False).note(2, {"mismatch/mean": 1.0})
    check = UpdateCheck(agreement(1e-6, 1e-3), 0, is_exact=True)
    check.note(2, {"mismatch/mean": 1e-6})
    check.note(3, {"mismatch/mean": 1.0})  # that later ones differ has other reasons: see doctor
