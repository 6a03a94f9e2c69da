"""The adapter of a server whose weights are trained with LoRA: every request uses it.

vLLM computes an adapter only for requests that name it, and its own kernel on CPU copies the
matrices of the adapter for each token. Here every request names the adapter that the trainer sends,
and on CPU two matrix products serve all tokens of a step. The adapter itself is loaded by
`telescope_train.weights.vllm_extension`.
"""

from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.input_processor import InputProcessor

ADAPTER_ID = 1
"""vLLM's number for the adapter. There is only this one."""
# vLLM reads the path only for an adapter that it does not hold. It then says that it found nothing
# there, so the path says what is missing.
_ADAPTER = LoRARequest("trained-adapter", ADAPTER_ID, "adapter-that-the-trainer-has-not-sent-yet")


def name_in_every_request() -> None:
    """Make every request of this process use the adapter, if the engine has adapters."""
    process = InputProcessor.process_inputs

    @wraps(process)
    def with_adapter(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        if self.lora_config is not None and kwargs.get("lora_request") is None:
            kwargs["lora_request"] = _ADAPTER
        return process(self, *args, **kwargs)

    InputProcessor.process_inputs = with_adapter  # type: ignore[method-assign]


def install_cpu_kernel() -> None:
    """Make models of this process compute the adapter with `OneAdapter`."""
    name = f"{OneAdapter.__module__}.{OneAdapter.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda _: name)


class OneAdapter(PunicaWrapperCPU):
    """Computes the adapter of slot 0 for all tokens of a step.

    Dims: T tokens, I inputs, O outputs of one of the matrices that a layer fuses, R rank.
    """

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add each adapter's product to its columns of `y`, which is changed in place."""
        if self.no_lora:
            return
        # Requests without the adapter exist only while vLLM warms up.
        assert self.batch_size == 1, "all requests of a server use the same adapter"
        first = 0
        for down_R, up_O, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low_TR = linear(x, down_R[0, 0])
            # One rounding, that of the sum: the product is added before it is rounded.
            y[:, first : first + width].addmm_(low_TR, up_O[0, 0].T, alpha=scale)
            first += width
