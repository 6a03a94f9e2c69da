"""Samples of a mixture with routes, and the slow gradient of the experts that they name."""

from dataclasses import replace

import numpy as np
import torch
from backend_cases import samples, slow_backward, slow_model

from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights


def routed_samples(config):
    """Samples with routes that no model would choose, but for one sample and every fifth token."""
    drawn = np.random.default_rng(1)
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    found = []
    for number, sample in enumerate(samples()):
        shape = (len(sample), config.num_hidden_layers, num_experts)
        routes = drawn.random(shape).argsort(-1)[..., : config.num_experts_per_tok]
        routes = routes.astype(np.int16)
        routes[::5] = -1
        found.append(replace(sample, routes=None if number == 3 else routes))
    return found


def routed_batches(config, *, seq_len, num_ranks=1):
    """Return the batches of each rank."""
    chosen = routed_samples(config)
    weights_N = token_weights(chosen, "token", max_tokens=64)
    return pack(chosen, weights_N, seq_len=seq_len, num_ranks=num_ranks)


def slow_routed_gradient(folder):
    """As `slow_gradient`, with routers that send token after token where its sample says."""
    model = slow_model(folder)
    chosen = iter(routed_samples(model.config))
    current = []
    model.register_forward_pre_hook(lambda *_: current.append(next(chosen)))
    normalizes = getattr(model.config, "norm_topk_prob", True)

    def router(module, layer):
        def forward(hidden):
            logits = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T
            weights, picked = [], []
            for token, row in enumerate(logits):
                routes = current[-1].routes
                known = routes is not None and routes[token, layer, 0] >= 0
                own = row.topk(module.top_k).indices
                experts = torch.tensor(routes[token, layer].astype(int)) if known else own
                among = row[experts] if normalizes else row
                weights.append(row[experts].exp() / among.exp().sum())
                picked.append(experts)
            return logits, torch.stack(weights), torch.stack(picked)

        return forward

    for number, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = router(module, number)
    slow_backward(model)
    return {name: value.grad.numpy() for name, value in model.named_parameters()}
