"""`PackedPolicy`: the module that is sharded and called; maps a PackedRow to log-probs.

Only positions that predict a trained token reach the output head. Under context parallelism each
rank runs a slice of the row through the layers, and every rank returns the log-probs of the whole
row. Dims: T tokens of the row, C tokens of this rank's slice, M trained tokens, L layers, E
experts, K experts that a token is sent to.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError
from telescope_train.models.attention.context_parallel import (
    CONTEXT_ATTENTION,
    ContextGroup,
    GatherTokens,
    register_context_attention,
)
from telescope_train.models.attention.kinds import EAGER, AttentionKind
from telescope_train.models.head import head_rule
from telescope_train.models.head_check import head_difference, head_in_float32
from telescope_train.models.logprobs import Head, chunked_logprobs
from telescope_train.models.moving import take_shared, to_device
from telescope_train.models.row import PackedRow

_NORMALIZES: dict[str, Callable[[Any], bool]] = {
    "Qwen3MoeTopKRouter": lambda router: router.norm_topk_prob,
    "MixtralTopKRouter": lambda router: True,
}
"""Class of a router -> whether the weights of the chosen experts are scaled to sum to 1."""


class TrainedLogprobs(NamedTuple):
    """The policy's values for the trained tokens."""

    logprobs_M: torch.Tensor
    """[M] nats."""
    entropy_M: torch.Tensor
    """[M] nats, of the whole distribution at each token."""


class PackedPolicy(torch.nn.Module):
    """A causal language model that returns log-probs for a PackedRow."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        chunk_size: int,
        vocab_size: int,
        entropy_grad: bool = False,
        wide_logits: bool = True,
    ) -> None:
        """Wrap `lm`.

        `chunk_size` is the most tokens in a block of logits. `entropy_grad` is for a loss that
        differentiates the entropy, which costs memory and time. `wide_logits` keeps logits in
        float32 where layers compute in less. ConfigError for a head of which the config says what
        this version does not know.
        """
        super().__init__()
        self.lm = lm
        self._head_rule = head_rule(lm.config.to_dict())
        self._chunk_size = chunk_size
        self.vocab_size = vocab_size
        self._entropy_grad = entropy_grad
        self._wide_logits = wide_logits
        self._replay: RoutingReplay | None = None
        """Replay of routes for a mixture, from the first row with routes on."""
        self.use_attention(EAGER)

    def use_attention(self, kind: AttentionKind, context: ContextGroup | None = None) -> None:
        """Use attention `kind` from now on, over the slices of `context` if rows are shared.

        Rows in which samples share prefixes need one of `SHARING_KINDS`.
        """
        kind.prepare()
        register_context_attention()
        name = kind.implementation if context is None else CONTEXT_ATTENTION
        self.lm.set_attn_implementation(name)
        self._attention, self._context = kind, context

    def forward(self, row: PackedRow, *, by_transformers: bool = False) -> TrainedLogprobs:
        """Return log-probs and entropies of the trained tokens.

        The head's weight is used inside this module's forward because only there is it whole on
        every rank, like the embeddings that it may be tied to. `by_transformers` uses the model's
        own logits of the whole row instead, for checks to compare with.
        """
        if by_transformers:
            self._replay_routes(None)
            return self._by_transformers(row)
        mine = slice(0, len(row.token_ids_T))
        if self._context is not None:
            mine = self._context.slice_of(len(row.token_ids_T))
        self._replay_routes(None if row.routes_TLK is None else row.routes_TLK[mine])
        # base_model instead of lm, which would compute the logits of all tokens.
        output = self.lm.base_model(**self._arguments(row, mine, self._context))
        tokens = (row.predictors_M, row.targets_M, row.temperatures_M)
        if self._context is not None:
            # A token may be predicted in the slice of the rank before. So it belongs to the rank
            # that has its predictor, and each token to exactly one rank.
            host_M = row.host_predictors_M
            is_mine_M = (host_M >= mine.start) & (host_M < mine.stop)
            places = to_device(np.flatnonzero(is_mine_M), row.predictors_M.device)
            tokens = tuple(one.index_select(0, places) for one in tokens)
            tokens = (tokens[0] - mine.start, *tokens[1:])
        predictors, targets, temperatures = tokens
        # Of samples that share a prefix, its last token predicts the first one of each.
        take = torch.index_select if row.sequences.shared is None else take_shared
        logprobs, entropy = chunked_logprobs(
            take(output.last_hidden_state[0], 0, predictors),
            self._head(),
            targets,
            temperatures,
            chunk_size=self._chunk_size,
            entropy_grad=self._entropy_grad,
            wide_logits=self._wide_logits,
        )
        if self._context is None:
            return TrainedLogprobs(logprobs, entropy)
        # All ranks of the group need all values: a loss may look at whole sequences.
        number, group = len(row.predictors_M), self._context.group
        return TrainedLogprobs(
            GatherTokens.apply(logprobs, places, number, group),
            GatherTokens.apply(entropy, places, number, group),
        )

    def _head(self) -> Head:
        """Return the whole head; only inside a forward of this module."""
        module, size = self.lm.get_output_embeddings(), self.vocab_size
        weight_VH, bias_V = module.weight, getattr(module, "bias", None)
        # Rows of padding have no probability; autograd fills their gradient with zeros. For that it
        # makes a second gradient of the whole matrix, so one without padding is not cut.
        if len(weight_VH) > size:
            weight_VH = weight_VH[:size]
            bias_V = None if bias_V is None else bias_V[:size]
        return Head(weight_VH, 0, size, None, bias_V, self._head_rule)

    def head_difference(self) -> float:
        """Return how far log-probs of the head alone are from transformers', in float32, nats.

        A collective like forward, once the module is sharded.
        """
        return head_difference(self.lm, self._head())

    def _replay_routes(self, routes_TLK: torch.Tensor | None) -> None:
        if routes_TLK is not None and self._replay is None:
            self._replay = RoutingReplay(self.lm)
        if self._replay is not None:
            self._replay.use(routes_TLK)

    def _by_transformers(self, row: PackedRow) -> TrainedLogprobs:
        # The plain formulas, on purpose: a check against the same code would prove nothing.
        # A head as wide as that of training: a rounding of large logits would be more nats than a
        # fault in the layers.
        with head_in_float32(self.lm) if self._wide_logits else nullcontext():
            output = self.lm(**self._arguments(row, slice(None), None))
        logits_MV = output.logits[0].index_select(0, row.predictors_M).float()
        all_MV = (logits_MV / row.temperatures_M[:, None]).log_softmax(-1)
        return TrainedLogprobs(
            all_MV.gather(1, row.targets_M[:, None])[:, 0], -(all_MV.exp() * all_MV).sum(-1)
        )

    def _arguments(
        self, row: PackedRow, tokens: slice, context: ContextGroup | None
    ) -> dict[str, object]:
        # Positions restart at every sequence, for the rotations and because transformers finds
        # packed sequences by them; it looks for them only without a cache.
        arguments = {
            "input_ids": row.token_ids_T[None, tokens],
            "position_ids": row.sequences.positions_T[None, tokens],
            "use_cache": False,
            **self._attention.arguments(row.sequences),
        }
        # Even for the whole row: the registered implementation stays that of context parallelism.
        if self._context is not None:
            arguments["context"] = (self._attention.implementation, context)
        return arguments


class RoutingReplay:
    """Sends each token of a mixture to the experts that the inference engine chose.

    If two experts are nearly as good, an engine and a trainer that round differently may choose
    different ones. Here the experts are the engine's choice, weighted by the present router. Paper:
    arXiv:2510.11370 (rollout routing replay). Deviation: tokens without known routes, such as
    padding, are routed by the model itself.
    """

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
