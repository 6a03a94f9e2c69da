"""Routing replay: a mixture sends each token to the experts that the inference engine chose.

If two experts are nearly as good, an engine and a trainer that round differently may choose
different ones. Here the experts are the engine's choice, weighted by the present router. Paper:
arXiv:2510.11370 (rollout routing replay). Deviation: tokens without known routes, such as padding,
are routed by the model itself. Dims: T tokens, L layers, E experts, K experts that a token is sent
to.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError

_NORMALIZES: dict[str, Callable[[Any], bool]] = {
    "Qwen3MoeTopKRouter": lambda router: router.norm_topk_prob,
    "MixtralTopKRouter": lambda router: True,
}
"""Class of a router -> whether the weights of the chosen experts are scaled to sum to 1."""


class RoutingReplay:
    """The routers of a model, which use the experts that they are given."""

    def __init__(self, lm: PreTrainedModel) -> None:
        """Replace the forward of each router; ConfigError if no router is of a known class."""
        self._routers: dict[int, Any] = {}
        self._chosen: dict[int, torch.Tensor | None] = {}
        for name, module in lm.named_modules():
            found = re.search(r"\blayers\.(\d+)\.", f"{name}.")
            if found is None or type(module).__name__ not in _NORMALIZES:
                continue
            layer = int(found[1])
            self._routers[layer] = module
            module.forward = partial(self._forward, layer, module.forward)
        if not self._routers:
            raise ConfigError(
                f"routing_replay: {type(lm).__name__} has no router that is known "
                f"({', '.join(_NORMALIZES)}); turn it off, or train another model"
            )
        self._num_layers = lm.config.get_text_config().num_hidden_layers

    def use(self, routes_TLK: torch.Tensor | None) -> None:
        """Use these experts in every pass from now on; -1 and None = the model chooses.

        A pass backward that computes layers again finds them, until the next call.
        """
        for layer, router in self._routers.items():
            if routes_TLK is None:
                self._chosen[layer] = None
                continue
            expected = (self._num_layers, router.top_k)
            if tuple(routes_TLK.shape[1:]) != expected:
                raise ConfigError(
                    f"routing_replay: expected routes of {expected[0]} layers and {expected[1]} "
                    f"experts for each token, got {tuple(routes_TLK.shape[1:])}; servers and "
                    "trainer must have the same model"
                )
            self._chosen[layer] = routes_TLK[:, layer]

    def _forward(
        self, layer: int, forward: Callable[..., Any], hidden_TH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE, own_TK, best_TK = forward(hidden_TH)
        chosen_TK = self._chosen.get(layer)
        if chosen_TK is None:
            return logits_TE, own_TK, best_TK
        chosen_TK = torch.where(chosen_TK >= 0, chosen_TK, best_TK)
        # In float32, as the model's own router does it.
        weights_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, chosen_TK)
        router = self._routers[layer]
        if _NORMALIZES[type(router).__name__](router):
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK.to(own_TK.dtype), chosen_TK
