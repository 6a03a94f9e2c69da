"""`PackedPolicy`: the module that is sharded and called; maps a PackedRow to log-probs.

Only positions that predict a trained token reach the output head. Under context parallelism each
rank runs a slice of the row through the layers, and every rank returns the log-probs of the whole
row. Dims: T tokens of the row, C tokens of this rank's slice, M trained tokens.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

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
from telescope_train.models.routing import RoutingReplay
from telescope_train.models.row import PackedRow


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
            predictors_M = row.predictors_M
            places = ((predictors_M >= mine.start) & (predictors_M < mine.stop)).nonzero()[:, 0]
            tokens = (predictors_M[places] - mine.start, *(one[places] for one in tokens[1:]))
        predictors, targets, temperatures = tokens
        logprobs, entropy = chunked_logprobs(
            output.last_hidden_state[0].index_select(0, predictors),
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
        # Rows of padding have no probability; autograd fills their gradient with zeros.
        bias_V = getattr(module, "bias", None)
        if bias_V is not None:
            bias_V = bias_V[:size]
        return Head(module.weight[:size], 0, size, None, bias_V, self._head_rule)

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
