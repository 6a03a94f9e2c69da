"""An unmodified agent program is trained through the gateway, on tokens that vLLM sampled."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
from tests.e2e.conftest import backend_settings, connected, local_ranks
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from telescope_core.evals import EvalFolder
from telescope_core.gateway import Gateway
from telescope_core.gateway.policies import RecordedEnvironment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.types import Completion, Group, Rollout, RolloutStatus, Sampling, Split, Turn
from telescope_train.algorithms import load_algorithm
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.packing import Packing
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.renderer import load_renderer
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Generation
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.step.credit import CreditRules, assign_credit
from telescope_train.step.minibatches import plan_step

sys.path.insert(0, str(Path(__file__).parent))
from agent_environment import AskedTwice
from how_to_agents import AGENTS, write_agents

pytestmark = pytest.mark.engine

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
SAMPLING = Sampling(max_tokens=12, temperature=1.0)
DEADLINE_S = 60.0


class RecordingPool(ServerPool):
    """The real pool, which keeps what the server was asked and what it answered."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        super().__init__([TokenClient(url) for url in base_urls])
        self.record: list[tuple[tuple[int, ...], Generation]] = []

    async def generate(self, request):
        generation = await super().generate(request)
        self.record.append((tuple(request.prompt_ids), generation))
        return generation


@pytest.fixture
async def recording_pool(first_weights: str):
    pool = RecordingPool([first_weights])
    yield pool
    await pool.close()


def rules_of(model: Path) -> CreditRules:
    config = TrainConfig.model_validate(
        {
            "run": {"name": "agents", "number_of_steps": STEPS, "seed": 0},
            "model": {"model": str(model)},
            "environments": [{"name": "agent"}],
        }
    )
    return CreditRules(
        algorithm=load_algorithm("grpo"),
        config=config,
        sampling={"agent": SAMPLING},
        vocab_size=103,
    )


async def play_step(client, policies, step: int) -> list[Group]:
    async def play(group: int, index: int) -> Rollout:
        request = PlayRequest(
            split=Split.TRAIN,
            example_index=step * GROUPS + group,
            group_id=f"{step}.{group}",
            index=index,
            sampling=SAMPLING,
            deadline_s=DEADLINE_S,
        )
        return await client.play(request, policies.policy(request.rollout_id, SAMPLING))

    async def play_group(group: int) -> Group:
        rollouts = await asyncio.gather(*(play(group, index) for index in range(GROUP_SIZE)))
        return Group(
            id=f"{step}.{group}",
            environment="agent",
            example_id=rollouts[0].example_id,
            rollouts=tuple(rollouts),
        )

    return await asyncio.gather(*map(play_group, range(GROUPS)))


def require_as_sampled(
    samples: Sequence[TrainingSample], record: Sequence[tuple[tuple[int, ...], Generation]]
) -> None:
    """Every trained token stands where the server sampled it, behind the prompt it had."""
    places = 0
    for prompt, generation in record:
        whole = [*prompt, *generation.token_ids]
        logprobs = np.array(generation.logprobs, np.float32)
        fits = [
            sample
            for sample in samples
            if sample.token_ids[: len(whole)].tolist() == whole
            and np.array_equal(sample.behavior_logprobs[len(prompt) : len(whole)], logprobs)
        ]
        assert len(fits) == 1
        places += len(logprobs)
    assert sum(int(sample.mask.sum()) for sample in samples) == places


def turns_that_branch(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the turns that begin with no chain as a whole, and require that none need not be.

    Random weights write special tokens too. An agent sends back the text, where they are missing,
    and no empty text: the turn after it starts anew, or where the turn before it started. So does
    a helper's, at another temperature.
    """
    count = 0
    ends: list[Turn] = []
    for number, turn in enumerate(rollout.turns):
        alike = [one for one in ends if one.temperature == turn.temperature]
        continued = [one for one in alike if _starts_with(turn.completion, one.completion)]
        ends = [one for one in ends if one not in continued] + [turn]
        if not continued:
            earlier = [r for r in rollout.turns[:number] if r.temperature == turn.temperature]
            assert not any(_is_plain(one.completion, tokenizer) for one in earlier[-1:]), earlier
            count += number > 0
    return count


def _starts_with(later: Completion, earlier: Completion) -> bool:
    whole = [*earlier.prompt_ids, *earlier.completion_ids]
    return list(later.prompt_ids[: len(whole)]) == whole


def _is_plain(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = completion.completion_ids
    written = ids[:-1] if completion.finish_reason == "stop" else ids
    text = tokenizer.decode(written, skip_special_tokens=True)
    return text == tokenizer.decode(written) and text != ""


async def test_an_agent_library_is_trained_on_exactly_what_was_sampled(
    tiny_model: Path, recording_pool: RecordingPool
) -> None:
    pool, rules = recording_pool, rules_of(tiny_model)
    ranks = local_ranks(backend_settings(tiny_model, learning_rate=1e-3))
    gateway = Gateway(model="policy")
    await gateway.start()
    try:
        publisher = await connected(pool, ranks)
        renderer = load_renderer(rules.config.model)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        policies = TokenPolicySource(pool, renderer, max_model_len=256, gateway=gateway)
        client = RecordedEnvironment(InProcessEnvironment(AskedTwice(), name="agent", version="0"))
        packing = Packing(seq_len=1024, num_ranks=1, hidden_size=128, max_tokens=12)
        for step in range(STEPS):
            pool.record.clear()
            groups = await play_step(client, policies, step)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            assert {r.status for r in rollouts} == {RolloutStatus.KEPT}, [r.error for r in rollouts]
            assert {v.completion.newest_version for r in rollouts for v in r.turns} == {step}
            credit = assign_credit(groups, rules)
            assert not credit.discarded
            require_as_sampled(credit.samples, pool.record)
            assert {sample.temperature for sample in credit.samples} == {1.0, 0.7}
            branched = sum(turns_that_branch(rollout, tokenizer) for rollout in rollouts)
            num_turns = sum(len(rollout.turns) for rollout in rollouts)
            # The first turn of an agent's helper is none that branches.
            num_first = sum(len({turn.agent for turn in one.turns}) for one in rollouts)
            num_helpers = num_first - len(rollouts)
            fraction = (branched - num_helpers) / (num_turns - num_first)
            assert credit.metrics["turns/branched"] == fraction > 0
            plan = plan_step(credit.samples, rules, packing, version=step)
            row = await ranks.train_step(plan, step)
            assert max(abs(row["mismatch/max"]), abs(row["mismatch/min"])) <= 1e-3
            await publisher.publish(step + 1)
    finally:
        await gateway.close()
        await ranks.close()


async def say_by_chat(client: openai.AsyncOpenAI, history: list) -> list:
    reply = await client.chat.completions.create(model="policy", messages=history)
    return [reply.choices[0].message]


async def say_by_responses(client: openai.AsyncOpenAI, history: list) -> list:
    async with client.responses.stream(model="policy", input=history) as stream:
        # Answers that are cut have no final response in the client's eyes.
        ended = [event async for event in stream][-1]
    return ended.response.output


async def say_by_messages(client: anthropic.AsyncAnthropic, history: list) -> list:
    async with client.messages.stream(model="policy", max_tokens=99, messages=history) as stream:
        reply = await stream.get_final_message()
    return [{"role": "assistant", "content": reply.content}]


@pytest.mark.nightly
@pytest.mark.parametrize("say", [say_by_chat, say_by_responses, say_by_messages])
async def test_twenty_turns_and_a_compaction_by_each_api(
    tiny_model: Path, recording_pool: RecordingPool, say
) -> None:
    gateway = Gateway(model="policy")
    await gateway.start()
    renderer = load_renderer(rules_of(tiny_model).config.model)
    policies = TokenPolicySource(recording_pool, renderer, max_model_len=1024, gateway=gateway)
    policy = policies.policy("0.0/0", SAMPLING)
    endpoint = policy.endpoint
    assert endpoint is not None
    connect, address = openai.AsyncOpenAI, endpoint.base_url
    if say is say_by_messages:
        connect, address = anthropic.AsyncAnthropic, endpoint.anthropic_base_url
    history: list = []
    async with connect(base_url=address, api_key=endpoint.api_key, max_retries=0) as client:
        for turn in range(20):
            asked = {"role": "user", "content": f"turn {turn}"}
            history = [asked] if turn == 12 else [*history, asked]
            history += await say(client, history)
    await gateway.close()
    assert len(policy.turns) == 20
    rollout = Rollout(
        environment="agent", example_id="e", group_id="g", index=0, turns=tuple(policy.turns)
    )
    require_as_sampled(samples_from_rollout(rollout, 1.0, 1.0), recording_pool.record)


def telescope(place: Path, *arguments: str) -> str:
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_agents_of_the_how_tos_are_measured(tmp_path: Path, vllm_server: str) -> None:
    """`test_synchronous_run` trains them."""
    write_agents(tmp_path)
    for name, num_turns in AGENTS.items():
        num_examples = 1 if name == "mend:Mend" else 2
        measured = telescope(
            tmp_path,
            *("eval", name, "--base-url", f"{vllm_server}/v1"),
            *("--examples", str(num_examples), "--rollouts", "4"),
            *("--max-tokens", "6", "--json", "--output", name.partition(":")[0]),
        )
        assert json.loads(measured)["num_scored"] == 4 * num_examples
        played = EvalFolder(tmp_path / name.partition(":")[0]).rows()
        assert {(row.num_turns, len(row.conversations)) for row in played} == {(num_turns, 1)}
        assert all(row.num_prompt_tokens and row.num_completion_tokens for row in played)
