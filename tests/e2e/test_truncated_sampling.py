"""Log-probs that a live vLLM server reports are those of the distribution that it sampled from."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope_core.types import Sampling
from telescope_train.inference.client import TokenClient
from telescope_train.inference.generation import Request

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 6]
LENGTH = 24
CASES = (
    Sampling(max_tokens=LENGTH, temperature=0.7, top_k=3),
    Sampling(max_tokens=LENGTH, top_p=0.4),
    Sampling(max_tokens=LENGTH, temperature=1.3, min_p=0.5),
    Sampling(max_tokens=LENGTH, repetition_penalty=1.7),
    Sampling(
        max_tokens=LENGTH, temperature=0.9, top_k=9, top_p=0.6, min_p=0.1, repetition_penalty=0.8
    ),
)


@pytest.fixture
async def client(vllm_server: str) -> AsyncIterator[TokenClient]:
    """A client of the session's server."""
    client = TokenClient(vllm_server)
    yield client
    await client.close()


def slow_logprobs(logits_V: torch.Tensor, seen: Sequence[int], how: Sampling) -> torch.Tensor:
    """Return [V] the log-probs of what `how` samples from, each rule applied by its definition."""
    logits = [float(one) for one in logits_V]
    for token in set(seen):
        penalty = how.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / (how.temperature or 1), 0)
    kept = [token for token, p in enumerate(probs) if p >= how.min_p * probs.max()]
    kept.sort(key=lambda token: -float(probs[token]))
    if how.top_k > 0:
        kept = kept[: how.top_k]
    total, nucleus, mass = sum(float(probs[token]) for token in kept), [], 0.0
    for token in kept:
        if mass >= how.top_p:
            break
        nucleus.append(token)
        mass += float(probs[token]) / total
    found = torch.full_like(probs, -torch.inf)
    found[nucleus] = torch.log(probs[nucleus] / probs[nucleus].sum())
    return found


@pytest.mark.parametrize("how", CASES)
async def test_logprobs_are_those_of_what_was_sampled_from(
    client: TokenClient, tiny_model: Path, how: Sampling
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    request = Request(prompt_ids=PROMPT, sampling=how, cache_salt="test")
    answers = await asyncio.gather(*(client.generate(request) for _ in range(4)))
    has_changed = False
    for answer in answers:
        ids = [*PROMPT, *answer.token_ids]
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids])).logits[0]
        for place, (token, reported) in enumerate(
            zip(answer.token_ids, answer.logprobs, strict=True), start=len(PROMPT)
        ):
            expected = slow_logprobs(logits_TV[place - 1], ids[:place], how)[token]
            assert reported == pytest.approx(float(expected), abs=1e-5)
            whole = torch.log_softmax(logits_TV[place - 1] / (how.temperature or 1), 0)[token]
            has_changed |= abs(float(whole) - reported) > 0.1
    assert has_changed, "the settings took nothing out of the distribution"
