"""An engine in this process: samples from the weights that the trainer sends, with transformers.

It takes the place of server, pool and publisher where no vLLM server is wanted. Requests that wait
are answered together, at most once at a time, in a thread. Letters: N requests, V vocabulary.
"""

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from telescope_core.errors import EndpointError
from telescope_core.types import Sampling, Span
from telescope_train.inference.generation import Generation, Request
from telescope_train.trainer.worker import TrainerWorker
from telescope_train.weights.digests import Digests


class _Waiting(NamedTuple):
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_token_ids: Sequence[int]
    answer: "asyncio.Future[Generation]"


class LocalEngine:
    """Looks like a pool of one server to policies, and like a publisher to the loop."""

    is_down = False
    num_lost = 0

    def __init__(self, folder: Path, worker: TrainerWorker, *, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._worker = worker
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: list[_Waiting] = []
        self._answering: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.version = 0

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(
            _Waiting(request.prompt_ids, request.sampling, request.stop_token_ids, answer)
        )
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def weights_change(self) -> None:
        """Take note of nothing."""

    async def publish(self, version: int) -> None:
        """Take the weights that the trainer sends."""
        async with self._lock:
            await asyncio.to_thread(self._receive)
            self.version = version

    async def close(self) -> None:
        """Wait for what is being sampled."""
        if self._answering is not None:
            await self._answering

    @torch.no_grad()
    def _receive(self) -> None:
        parameters, digests = dict(self._model.named_parameters()), Digests()
        for name, value in self._worker.backend.transfer_weights():
            parameters.pop(name).copy_(value)
            digests.add(name, value.contiguous().reshape(-1).view(torch.uint8))
        assert not parameters, f"not sent: {sorted(parameters)}"
        # As if it had gone over a wire, so that the trainer tells what an update left as it was.
        self._worker._sending._sent = digests

    async def _answer(self) -> None:
        while self._waiting:
            await asyncio.sleep(0.01)
            async with self._lock:
                waiting, self._waiting = self._waiting, []
                kinds: dict[Any, list[_Waiting]] = {}
                for one in waiting:
                    how = one.sampling
                    kind = (how.max_tokens, how.temperature, how.top_k, *one.stop_token_ids)
                    kinds.setdefault(kind, []).append(one)
                for requests in kinds.values():
                    await self._answer_alike(requests)

    async def _answer_alike(self, requests: Sequence[_Waiting]) -> None:
        try:
            found = await asyncio.to_thread(self._sample, requests)
        except BaseException as error:
            for request in requests:
                request.answer.set_exception(EndpointError(f"the engine failed: {error!r}"))
            raise
        for request, generation in zip(requests, found, strict=True):
            if not request.answer.done():
                request.answer.set_result(generation)

    @torch.no_grad()
    def _sample(self, requests: Sequence[_Waiting]) -> list[Generation]:
        sampling, stops = requests[0].sampling, torch.tensor([*requests[0].stop_token_ids, -1])
        longest = max(len(one.prompt_ids) for one in requests)
        ids_NT = torch.zeros((len(requests), longest), dtype=torch.long)
        seen_NT = torch.zeros_like(ids_NT)
        for row, one in enumerate(requests):
            start = longest - len(one.prompt_ids)
            ids_NT[row, start:], seen_NT[row, start:] = torch.tensor(list(one.prompt_ids)), 1
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        has_ended_N = torch.zeros(len(requests), dtype=torch.bool)
        cache, places_NT = None, (seen_NT.cumsum(1) - 1).clamp_min(0)
        for _ in range(sampling.max_tokens):
            out = self._model(
                ids_NT,
                attention_mask=seen_NT,
                position_ids=places_NT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits_NV = out.past_key_values, out.logits[:, -1] / sampling.temperature
            if sampling.top_k > 0:
                least_N1 = logits_NV.topk(sampling.top_k).values[:, -1:]
                logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
            all_NV = logits_NV.log_softmax(-1)
            ids_NT = torch.multinomial(all_NV.exp(), 1, generator=self._generator)
            found.append((ids_NT, all_NV.gather(1, ids_NT)))
            seen_NT = torch.cat([seen_NT, torch.ones_like(ids_NT)], 1)
            places_NT = places_NT[:, -1:] + 1
            has_ended_N |= torch.isin(ids_NT[:, 0], stops)
            if has_ended_N.all():
                break
        ids_NT, logprobs_NT = (torch.cat(part, 1) for part in zip(*found, strict=True))
        return [
            self._generation(ids, logprobs, stops.tolist())
            for ids, logprobs in zip(ids_NT.tolist(), logprobs_NT.tolist(), strict=True)
        ]

    def _generation(self, ids: list[int], logprobs: list[float], stops: list[int]) -> Generation:
        size = next((n + 1 for n, one in enumerate(ids) if one in stops), len(ids))
        return Generation(
            token_ids=array("i", ids[:size]),
            logprobs=array("f", logprobs[:size]),
            finish_reason="stop" if ids[size - 1] in stops else "length",
            spans=(Span(self.version, size),),
        )
