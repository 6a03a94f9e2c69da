"""A policy that samples from a model in this process, and learning with it, without a server.

All rollouts of a step wait at their turn, and are then answered as one batch: whole steps take
seconds.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope_core.base.chains import sampled_tokens
from telescope_core.environments.base import Environment
from telescope_core.playing.rollout import play_rollout
from telescope_core.protocols import PlayRequest
from telescope_core.types import Completion, Group, Message, Sampling, Split
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.chat.message_form import MessageForm
from telescope_train.config.schema import TrainConfig
from telescope_train.step.credit import Credit, CreditRules, assign_credit
from telescope_train.step.minibatches import plan_step
from telescope_train.trainer.worker import TrainerWorker


class InProcessPolicy:
    """Samples from its own copy of the weights."""

    def __init__(self, folder, *, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._generator = torch.Generator().manual_seed(seed)
        self._version = 0
        self._waiting: list[tuple[list[int], Sampling, asyncio.Future]] = []

    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                parameters.pop(name).copy_(value)
        assert not parameters, f"not sent: {sorted(parameters)}"
        self._version = version

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools=()
    ) -> Completion:
        plain = [MessageForm().plain(message) for message in messages]
        text = self._tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True
        )
        prompt_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids, sampling, answer))
        return await answer

    def answer_all(self) -> None:
        """Answer every request that waits; prompts and settings of one step are alike."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        sampling = waiting[0][1]
        assert all(other == sampling for _, other, _ in waiting)
        prompts_NP = torch.tensor([prompt_ids for prompt_ids, _, _ in waiting])
        ids_NC, logprobs_NC = self._sample(prompts_NP, sampling)
        rows = zip(waiting, ids_NC.tolist(), logprobs_NC.tolist(), strict=True)
        for (prompt_ids, _, answer), ids, logprobs in rows:
            answer.set_result(self._completion(prompt_ids, ids, logprobs))

    @torch.no_grad()
    def _sample(
        self, prompts_NP: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = prompts_NP, []
        for _ in range(sampling.max_tokens):
            logits_NV = self._model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            all_NV = (logits_NV / sampling.temperature).log_softmax(-1)
            drawn_N1 = torch.multinomial(all_NV.exp(), 1, generator=self._generator)
            logprobs.append(all_NV.gather(1, drawn_N1))
            ids = torch.cat([ids, drawn_N1], 1)
        return ids[:, prompts_NP.shape[1] :], torch.cat(logprobs, 1)

    def _completion(
        self, prompt_ids: list[int], ids: list[int], logprobs: list[float]
    ) -> Completion:
        end = self._tokenizer.eos_token_id
        has_ended = end in ids
        size = ids.index(end) + 1 if has_ended else len(ids)
        text = self._tokenizer.decode(ids[: size - has_ended])
        return Completion(
            message=Message(role="assistant", content=text),
            finish_reason="stop" if has_ended else "length",
            tokens=sampled_tokens(prompt_ids, ids[:size], logprobs[:size]),
            oldest_version=self._version,
            newest_version=self._version,
            num_prompt_tokens=len(prompt_ids),
            num_completion_tokens=size,
        )


async def play_groups(
    environment: Environment,
    policy: InProcessPolicy,
    *,
    examples: range,
    group_size: int,
    sampling: Sampling,
) -> list[Group]:
    """Play and score `group_size` rollouts of each example."""
    requests = [
        PlayRequest(
            split=Split.TRAIN,
            example_index=number,
            group_id=str(number),
            index=index,
            sampling=sampling,
            deadline_s=60.0,
        )
        for number in examples
        for index in range(group_size)
    ]
    async with asyncio.TaskGroup() as tasks:
        playing = [
            tasks.create_task(play_rollout(environment, "toy", request, policy))
            for request in requests
        ]
        while not all(task.done() for task in playing):
            policy.answer_all()
            await asyncio.sleep(0)
    rollouts = [task.result() for task in playing]
    parts = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
    return [
        Group(
            id=part[0].group_id,
            environment="toy",
            example_id=part[0].example_id,
            rollouts=tuple(part),
        )
        for part in parts
    ]


def learning_config(
    model: Path, algorithm: str, *, num_steps: int, group_size: int, max_tokens: int, **others: Any
) -> TrainConfig:
    """Return settings with which a tiny model learns a tiny task in a dozen steps."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "learn", "number_of_steps": num_steps, "seed": 0},
            "model": {"model": str(model)},
            "environments": [{"name": "toy"}],
            "rollout": {"group_size": group_size, "max_tokens": max_tokens},
            "algorithm": {"algorithm": algorithm, "number_of_minibatches": 2, **others},
            "trainer": {"learning_rate": 1e-3, "seq_len": 1024, "gradient_checkpointing": False},
        }
    )


async def learn(
    policy: InProcessPolicy,
    environment: Environment,
    config: TrainConfig,
    *,
    num_prompts: int,
    look: Callable[[int, list[Group], Credit], None],
) -> None:
    """Play, credit and train as `config` says; `look` sees what each step is about to learn."""
    max_tokens, group_size = config.rollout.max_tokens, config.rollout.group_size
    sampling = Sampling(max_tokens=max_tokens)
    rules = CreditRules(
        algorithm=load_algorithm(config.algorithm.algorithm),
        config=config,
        sampling={"toy": sampling},
        vocab_size=103,
    )
    packing = Packing(seq_len=1024, num_ranks=1, hidden_size=128, max_tokens=max_tokens)
    worker = TrainerWorker(BackendSettings.from_config(config, device="cpu"))
    try:
        for version in range(config.run.number_of_steps):
            groups = await play_groups(
                environment,
                policy,
                examples=range(version * num_prompts, (version + 1) * num_prompts),
                group_size=group_size,
                sampling=sampling,
            )
            credit = assign_credit(groups, rules)
            look(version, groups, credit)
            plan = plan_step(credit.samples, rules, packing, version=version)
            if not plan.order:
                continue
            worker.train_minibatches(plan.of_rank(0), plan.order, version=version)
            policy.take_weights(worker.export_weights(), version=version + 1)
    finally:
        worker.close()
