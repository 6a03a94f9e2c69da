"""Requests with a seed on CPU whose prompt takes the engine several steps.

vLLM draws a token for such a request at each of these steps, forgets it, and sets the request's
generator back. Generators of a CPU cannot be set back, so that the engine died of it. Here the
draws that will be forgotten are made without the request's generator.
"""

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def install() -> None:
    """Keep the generators of requests from draws that count for nothing, in this process."""
    sample: Any = CPUModelRunner._sample
    keep_books: Any = CPUModelRunner._bookkeeping_sync

    def _sample(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = self.input_batch
        forgotten = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        self._unused_generators = {
            index: batch.generators.pop(index) for index in forgotten if index in batch.generators
        }
        return sample(self, *arguments, **named)

    def _bookkeeping_sync(self: Any, *arguments: Any, **named: Any) -> Any:
        found = keep_books(self, *arguments, **named)
        self.input_batch.generators.update(self._unused_generators)
        return found

    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync
