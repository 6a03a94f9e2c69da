"""TRL's own loss function on log-probs that are given, without a model and without a trainer."""

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
        return value

    @staticmethod
    def reduce(value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value


def trl_loss(
    columns: dict[str, torch.Tensor],
    *,
    loss_type: str,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.0,
    delta: float | None = None,
    max_completion_length: int = 0,
) -> torch.Tensor:
    """Return the loss of TRL 1.16 over rows of `columns` ([B, L], and advantages [B]).

    The columns: policy (requires grad), old, reference, mask, advantages, and `ratio`, what the
    policy term is multiplied by for the sampler's sake, if it is.
    """
    policy, mask = columns["policy"], columns["mask"]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.ones_like(policy), None),
        accelerator=_OneProcess,
        args=SimpleNamespace(
            delta=delta,
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
        beta=beta,
        max_completion_length=max_completion_length,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm="ratio" in columns,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["old"],
        "ref_per_token_logps": columns["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": columns.get("ratio"),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)
