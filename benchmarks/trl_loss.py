"""TRL's own loss function on log-probs that are given, without a model and without a trainer.

Shared by `bench_loss.py` and by the test that compares the two losses.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer


class _OneProcess:
    """What TRL asks of accelerate, for one process."""

    num_processes = 1

    @staticmethod
    def gather(value: torch.Tensor) -> torch.Tensor:
        """Return the value of the only process."""
        return value

    @staticmethod
    def reduce(value: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the value of the only process."""
        return value


def trl_loss(
    columns: dict[str, torch.Tensor],
    *,
    loss_type: str,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    **more: float,
) -> torch.Tensor:
    """Return the loss of TRL 1.16 over rows of `columns` ([B, L], and advantages [B]).

    The columns: policy (requires grad), old, reference if there is a beta, mask, advantages, and
    `ratio`, what the policy term is multiplied by for the sampler's sake, if it is. `more`: of
    beta, delta and max_completion_length what is not TRL's default here. Nothing is
    computed here that TRL's trainer would not compute: this is timed.
    """
    policy, mask = columns["policy"], columns["mask"]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, policy.detach(), None),
        accelerator=_OneProcess,
        args=SimpleNamespace(
            delta=more.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=more.get("beta", 0.0),
        max_completion_length=more.get("max_completion_length", 0),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm="ratio" in columns,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {  # the ids are not read: the log-probs are given
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["old"],
        "ref_per_token_logps": columns.get("reference"),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": columns.get("ratio"),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)
