"""Whether servers compute a LoRA adapter, and facts they need before the trainer sends it.

Imports no torch.
"""

from dataclasses import dataclass

from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import TrainerSection

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM reserves memory; a smaller adapter is padded with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """The adapter for all requests of a server."""

    rank: int
    """At most the last of `VLLM_RANKS`."""
    target_modules: tuple[str, ...]
    """Last part of the name of each matrix with an adapter."""

    @classmethod
    def from_settings(cls, trainer: TrainerSection) -> "ServedAdapter":
        """Return the adapter that these settings train."""
        return cls(rank=trainer.lora_rank, target_modules=trainer.lora_target_modules)

    def arguments(self) -> list[str]:
        """Return the arguments for it on vLLM's command line."""
        room = next(one for one in VLLM_RANKS if one >= self.rank)
        # Without the names vLLM would compute empty adapters for all other matrices as well.
        return [
            *("--enable-lora", "--max-lora-rank", str(room)),
            *("--lora-target-modules", *self.target_modules),
        ]


def served_adapter(config: TrainConfig) -> ServedAdapter | None:
    """Return the adapter that servers compute; None if they get weights."""
    if not config.trainer.use_lora or config.weights.lora_transfer != "adapter":
        return None
    return ServedAdapter.from_settings(config.trainer)
