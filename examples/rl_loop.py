"""GRPO in one file: a loop to read from top to bottom, and to change when you have an idea.

    python examples/rl_loop.py --steps 12

A vLLM server samples, this process trains, and the new weights go back to the server after every
step. The pieces are Telescope's public ones, the algorithm is written out here. `telescope train`
does the same with many ranks and servers, sampling ahead, checkpoints, evals and records.

Letters at the end of names are dimensions: N rollouts of a step, G rollouts of a group, T tokens of
a packed batch, M trained tokens of a packed batch.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telescope_core import Example, Sampling, SingleTurnEnvironment, Split, SplitSource, reward
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.types import Rollout
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.cluster.ports import HeldPort
from telescope_train.config.schema import ModelSection
from telescope_train.inference.client import TokenClient
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import ServerSettings, running
from telescope_train.models.load import load_model
from telescope_train.models.packed import PackedPolicy
from telescope_train.models.row import packed_row
from telescope_train.models.tiny import make_tiny_model
from telescope_train.weights.publish import WeightPublisher
from telescope_train.weights.transport import load_transport, send

PROMPTS, GROUP_SIZE = 12, 12
"""Prompts of a step, and rollouts of each prompt."""
MAX_TOKENS, SEQ_LEN = 4, 1024
"""Tokens of an answer, and of a packed batch."""
LEARNING_RATE, CLIP, MAX_NORM = 1e-3, 0.2, 1.0


# 1. The environment: what is asked, and what an answer is worth.


class Digits(SingleTurnEnvironment):
    """Write four digits: a random model starts near 0.1, so that every step can teach something."""

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self.sources = {split: SplitSource(self.draw, split=split, seed=0) for split in Split}

    def examples(self, split: Split) -> SplitSource:
        return self.sources[split]

    def draw(self, random) -> Example:
        text = f"{random.randrange(1000):03d}="
        return Example(id=text, prompt=text, answer="0000")

    @reward
    def digits(self, rollout: Rollout, example: Example) -> float:
        return sum(map(str.isdigit, rollout.completion_text[:MAX_TOKENS])) / MAX_TOKENS


# 2. Sampling: groups of rollouts, with the tokens and log-probs that the server sampled.


async def sample_groups(
    environment: InProcessEnvironment, policies: TokenPolicySource, step: int
) -> list[list[Rollout]]:
    """Play `GROUP_SIZE` rollouts of each prompt of `step`, all at once."""
    sampling = Sampling(max_tokens=MAX_TOKENS)

    async def play(example_index: int, index: int) -> Rollout:
        request = PlayRequest(
            split=Split.TRAIN,
            example_index=example_index,
            group_id=f"{step}.{example_index}",
            index=index,
            sampling=sampling,
            deadline_s=60.0,
        )
        return await environment.play(request, policies.policy(request.rollout_id))

    examples = range(step * PROMPTS, (step + 1) * PROMPTS)
    groups = (
        asyncio.gather(*(play(example, index) for index in range(GROUP_SIZE)))
        for example in examples
    )
    return await asyncio.gather(*groups)


# 3. Credit: how much better than the rest of its group each rollout was.


def advantages_of(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (reward - mean) / deviation. Paper: arXiv:2402.03300, section 4.1.2."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6)


def samples_of(groups: Sequence[Sequence[Rollout]]) -> list[TrainingSample]:
    """Return what is trained on; a group of equal rewards has no advantage and is left out."""
    samples: list[TrainingSample] = []
    for group in groups:
        # A failed rollout has no reward. It is left out: a failure is not a reward of 0.
        scored = [rollout for rollout in group if rollout.reward is not None]
        rewards_G = np.array([rollout.reward for rollout in scored])
        if len(scored) > 1 and rewards_G.std() > 0:
            for rollout, advantage in zip(scored, advantages_of(rewards_G), strict=True):
                samples += samples_from_rollout(rollout, float(advantage), temperature=1.0)
    return samples


# 4. The loss of one token. Weights, packing and the sum over tokens are not its business.


def token_loss(logprobs_M: Tensor, behavior_M: Tensor, advantages_M: Tensor) -> Tensor:
    """Return PPO's clipped objective, negated. Paper: arXiv:1707.06347, eq. 7.

    `behavior_M` are the log-probs (nats) under which the server sampled the tokens.
    """
    ratio_M = (logprobs_M - behavior_M).exp()
    clipped_M = ratio_M.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)


# 5. Learning: packed batches in, one optimizer step.


class Learner:
    """The model in training, and its side of the weight transfer."""

    def __init__(self, model: Path) -> None:
        loaded = load_model(str(model))
        self.lm = loaded.model
        # Gives the log-probs of the trained tokens of a row whose samples do not see each other.
        self.policy = PackedPolicy(loaded.model, chunk_size=256, vocab_size=loaded.vocab_size)
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=LEARNING_RATE)
        self.held, self.transport = HeldPort(), load_transport("gloo")

    def step(self, samples: Sequence[TrainingSample]) -> float:
        """Take one step; returns the largest gap to the server's log-probs before it, in nats."""
        # Each token gets its share of the loss before packing and is only summed from then on.
        weights_N = token_weights(samples, "token", max_tokens=MAX_TOKENS)
        (batches,) = pack(samples, weights_N, seq_len=SEQ_LEN, num_ranks=1)
        gaps = [self._accumulate(batch) for batch in batches]
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return max(gaps)

    def _accumulate(self, batch: PackedBatch) -> float:
        row = packed_row(batch, torch.device("cpu"))
        logprobs_M = self.policy(row).logprobs_M
        behavior_M, advantages_M, weights_M = (
            torch.from_numpy(array_T[row.trained_M])
            for array_T in (batch.behavior_logprobs_T, batch.advantages_T, batch.weights_T)
        )
        loss_M = token_loss(logprobs_M, behavior_M, advantages_M)
        (loss_M * weights_M).sum().backward()
        return float((logprobs_M.detach() - behavior_M).abs().max())

    # What `WeightPublisher` asks of whoever trains:
    async def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors in the order in which they are sent."""
        return [TensorHeader.from_tensor(name, value) for name, value in self.lm.named_parameters()]

    async def meeting_point(self) -> tuple[str, int]:
        """Return where servers find this process."""
        return "127.0.0.1", self.held.hold()

    async def connect(self, place: Place, *, wait_s: float | None = None) -> None:
        """Wait, in a thread, until every server has joined."""
        at = {"device": torch.device("cpu"), "listen_fd": self.held.hand_over(place.port)}
        self.sender = await asyncio.to_thread(self.transport.sender, place, wait_s=wait_s, **at)

    async def send_weights(self) -> str:
        """Send every tensor once; returns a digest, which every server must find as well."""
        tensors = [(name, value.detach()) for name, value in self.lm.named_parameters()]
        what = (self.sender, await self.weight_headers(), tensors)
        self.sent = await asyncio.to_thread(send, *what, bucket_bytes=Wire().bucket_bytes)
        return self.sent.whole()

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of each tensor: what differs is named if a server found another."""
        return self.sent.by_name()


# 6. The loop.


async def train(
    model: Path, base_url: str, *, steps: int, show: Callable[[str], None] = print
) -> list[float]:
    """Train `model`, served at `base_url`, and return the mean reward of each step."""
    learner, pool = Learner(model), ServerPool([TokenClient(base_url)])
    environment = InProcessEnvironment(Digits(), name="digits")
    renderer = load_renderer(ModelSection(model=str(model)))
    policies = TokenPolicySource(pool, renderer, max_model_len=None)
    publisher = WeightPublisher(pool, learner, in_flight="continue")
    rewards: list[float] = []
    try:
        await publisher.connect()
        for step in range(steps):
            groups = await sample_groups(environment, policies, step)
            scores = [one.reward for group in groups for one in group if one.reward is not None]
            rewards.append(float(np.mean(scores)))
            samples = samples_of(groups)
            gap = await asyncio.to_thread(learner.step, samples) if samples else 0.0
            await publisher.publish(step + 1)
            show(f"step {step + 1}: reward {rewards[-1]:.3f}, engine and trainer {gap:.1e} apart")
    finally:
        await pool.close()
        await environment.close()
    return rewards


def main() -> None:
    """Make a small model, serve it, and train it."""
    parser = argparse.ArgumentParser(description="GRPO in one file, over a live vLLM server.")
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps must be at least 1, got {steps}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", seed=3)
        settings = ServerSettings(
            model_path=str(model),
            log_path=Path(folder) / "server.log",
            max_model_len=256,
            takes_weights=True,
        )
        print("starting a vLLM server")
        with running(settings) as server:
            asyncio.run(train(model, server.root, steps=steps))


if __name__ == "__main__":
    main()
