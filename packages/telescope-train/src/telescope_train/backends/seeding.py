"""Seed the random generators of a trainer process, and save and restore their state."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed every generator that this process may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of every generator."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of every generator; that of a GPU may be absent."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
