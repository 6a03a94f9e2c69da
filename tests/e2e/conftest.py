"""Fixtures of the end-to-end tests: a tiny model and a real vLLM server for it."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from telescope_train.backends.protocol import BackendSettings
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.inference.client import TokenClient
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import ServerSettings, running
from telescope_train.models.tiny import make_tiny_model
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.worker import TrainerWorker
from telescope_train.weights.publish import WeightPublisher

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whoever starts tests in the background may have them ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model on disk."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's server writes what it says."""
    return tmp_path_factory.mktemp("logs") / "inference-0.log"


@pytest.fixture(scope="session")
def vllm_server(tiny_model: Path, server_log: Path) -> Iterator[str]:
    """The base URL of the one vLLM server that all tests of the session ask."""
    with pytest.MonkeyPatch.context() as patched:
        # Servers log their config, which whoever starts the tests may have turned off.
        patched.setenv("VLLM_LOGGING_LEVEL", "INFO")
        settings = tiny_server(tiny_model, server_log)
        with ExitStack() as stack:
            with pytest.MonkeyPatch.context() as of_shell:
                # What a shell may have from another server, and a locale that is not UTF-8.
                of_shell.setenv("VLLM_API_KEY", "of another server")
                of_shell.setenv("LC_ALL", "C")
                of_shell.setenv("PYTHONUTF8", "0")
                stack.enter_context(running(settings, deadline_s=180))
            yield settings.base_url


@pytest.fixture
async def first_weights(tiny_model: Path, vllm_server: str) -> AsyncIterator[str]:
    """The URL of the session's server, for a test that changes its weights: it gets them back."""
    yield vllm_server
    pool = ServerPool([TokenClient(vllm_server)])
    ranks = local_ranks(backend_settings(tiny_model))
    try:
        publisher = await connected(pool, ranks)
        await publisher.restore(0)
        await pool.clients[0].control("/update_weight_version", {"new_version": "default"})
    finally:
        await ranks.close()
        await pool.close()


@pytest.fixture
async def fresh_pool(first_weights: str) -> AsyncIterator[ServerPool]:
    """A pool of the session's server, which holds the initial weights before and after the test."""
    pool = ServerPool([TokenClient(first_weights)])
    yield pool
    await pool.close()


def tiny_server(model: Path, log_path: Path) -> ServerSettings:
    """Settings of a server whose weights can be updated."""
    return ServerSettings(
        model_path=str(model),
        port=free_port(),
        log_path=log_path,
        # Enough for answers that are still being sampled when a test looks for them.
        max_model_len=1024,
        takes_weights=True,
    )


def local_ranks(settings: BackendSettings) -> LocalRanks:
    """One trainer rank in this process."""
    return LocalRanks(TrainerWorker(settings))


def backend_settings(model: Path, **trainer: Any) -> BackendSettings:
    """Settings for a short run of `model`."""
    return BackendSettings(
        model=ModelSection(model=str(model)),
        trainer=TrainerSection(seq_len=1024, **trainer),
        algorithm=AlgorithmSection(),
        seed=0,
        number_of_steps=100,
    )


async def connected(pool: ServerPool, ranks: LocalRanks) -> WeightPublisher:
    """Return a publisher from `ranks` to the servers of `pool`."""
    publisher = WeightPublisher(pool, ranks, in_flight="pause")
    await publisher.connect()
    return publisher
