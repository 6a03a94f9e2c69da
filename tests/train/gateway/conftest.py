"""A gateway on loopback in front of a scripted pool."""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope_core.gateway import Gateway
from telescope_core.types import Sampling
from telescope_train.inference.policy import TokenPolicySource

sys.path.insert(0, str(Path(__file__).parent))
from scripted_pool import ScriptedPool, make_renderer

SAMPLING = Sampling(max_tokens=400, temperature=0.9)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., SimpleNamespace]]:
    """Return a function that opens one rollout: its policy, its endpoint and the pool behind."""
    gateway = Gateway(model="policy")
    await gateway.start()

    def open_rollout(reply, *, keep_thinking=True, sampling=SAMPLING, **options) -> SimpleNamespace:
        renderer = make_renderer(keep_thinking=keep_thinking)
        script = reply if callable(reply) else lambda _: reply
        pool = ScriptedPool(renderer, script)
        options = {"max_model_len": None, **options}
        source = TokenPolicySource(pool, renderer, gateway=gateway, **options)
        policy = source.policy("0.0/0", sampling)
        return SimpleNamespace(
            policy=policy, endpoint=policy.endpoint, pool=pool, renderer=renderer, source=source
        )

    yield open_rollout
    await gateway.close()
