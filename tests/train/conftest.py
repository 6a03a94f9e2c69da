"""Builders shared by the tests of the trainer's maths.

Torch and transformers are imported by the fixtures that need them: most folders need neither.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from telescope_train.batches.batch import TrainingSample

# Triton defines the functions of its language when it is imported: for a GPU, as other imports of
# the tests would have it, or for its interpreter, in which kernels run without one.
os.environ["TRITON_INTERPRET"] = "1"
with suppress(ImportError):
    import triton.language  # noqa: F401
del os.environ["TRITON_INTERPRET"]

if TYPE_CHECKING:
    from telescope_train.backends.protocol import BackendSettings
    from telescope_train.trainer.worker import TrainerWorker


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


@pytest.fixture(scope="session")
def tiny_of_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model of the quickstart on disk, with three layers of 128 numbers."""
    from telescope_train.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "quickstart", seed=0)


@pytest.fixture(scope="session")
def tiny(tiny_of_quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two layers of 32 numbers: most tests run a model often, whatever its size."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tiny_of_quickstart, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    kinds = ["full_attention"] * 2
    config = Qwen3Config.from_pretrained(folder, **sizes, layer_types=kinds, initializer_range=0.16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start() -> "Iterator[Callable[[BackendSettings], TrainerWorker]]":
    """Return a function that starts a rank in this process; it is closed at the end."""
    from telescope_train.trainer.worker import TrainerWorker

    workers: list[TrainerWorker] = []

    def build(settings: "BackendSettings") -> TrainerWorker:
        if workers:
            workers.pop().close()
        workers.append(TrainerWorker(settings))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()
