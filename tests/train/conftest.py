"""Builders shared by the tests of the trainer's maths."""

from collections.abc import Callable

import numpy as np
import pytest

from telescope_train.batch import TrainingSample


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., TrainingSample]:
    """Return a builder of samples with arbitrary but reproducible content."""

    def build(
        num_prompt: int = 2,
        num_completion: int = 3,
        *,
        rollout: int = 0,
        group: str = "g",
        advantage: float = 1.0,
        vocab_size: int = 11,
        version: int = 0,
    ) -> TrainingSample:
        length = num_prompt + num_completion
        rng = np.random.default_rng([num_prompt, num_completion, rollout, len(group)])
        mask = np.arange(length) >= num_prompt
        logprobs = np.where(mask, -rng.random(length) - 0.5, np.nan)
        return TrainingSample(
            token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
            mask=mask,
            behavior_logprobs=logprobs.astype(np.float32),
            advantage=advantage,
            temperature=1.0 + 0.25 * (rollout % 3),
            oldest_version=version,
            newest_version=version + 1,
            group_id=group,
            rollout_index=rollout,
            environment="toy",
        )

    return build
