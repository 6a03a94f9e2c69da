"""Forward and backward passes over rows through the library's schedule of pipeline stages.

Results exist on the last stage alone; `share_results` gives them to the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from telescope_train.backends.megatron.model import run_model
from telescope_train.backends.megatron.rows import RankRow
from telescope_train.models.packed import TrainedLogprobs

Found = TypeVar("Found")


def run_rows(
    model: Any,
    rows: Sequence[RankRow],
    use: Callable[[int, TrainedLogprobs], torch.Tensor],
    *,
    backward: bool,
) -> None:
    """Run each row through all stages; `use` maps its number and log-probs to a loss.

    It is called on the last stage. With `backward` the gradient of its loss is added to the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(numbered: Any, wrapped: Any) -> tuple[Any, Any]:
        number, row = next(numbered)
        output = run_model(wrapped, row)

        def loss_of(found: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            loss = use(number, found)
            # The library counts tokens here to divide by them, which `calculate_per_token_loss`
            # leaves to us.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        return output, loss_of

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(enumerate(rows)),
        model=model,
        num_microbatches=len(rows),
        # Rows have lengths of their own; the stages tell each other.
        seq_length=1,
        micro_batch_size=1,
        forward_only=not backward,
    )


def share_results(found: Found) -> Found:
    """Copy the results of the last pipeline stage to every stage."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    everything: list[Any] = [None] * group.size()
    dist.all_gather_object(everything, found, group=group)
    return everything[-1]
