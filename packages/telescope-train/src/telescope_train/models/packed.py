"""`PackedPolicy`: the module that is sharded and called, from a PackedRow to log-probs.

Only positions that predict a trained token reach the output head. Under context parallelism each
rank runs a slice of the row through the layers, and every rank returns all of it.
Dims: T tokens of the row, C tokens of this rank's slice, M trained tokens.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from telescope_core.errors import ConfigError
from telescope_train.logprobs import chunked_logprobs
from telescope_train.models.attention_kinds import SDPA, AttentionKind
from telescope_train.models.row import PackedRow


class TrainedLogprobs(NamedTuple):
    """What the policy says of the trained tokens."""

    logprobs_M: torch.Tensor
    entropy_M: torch.Tensor


class PackedPolicy(torch.nn.Module):
    """A causal language model that answers a PackedRow with log-probs."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        chunk_size: int,
        vocab_size: int,
        entropy_grad: bool = False,
    ) -> None:
        """`entropy_grad`: the loss differentiates the entropy, which costs memory and time."""
        super().__init__()
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            raise ConfigError(
                f"{type(lm).__name__} has a bias in its output head; this version cannot train it"
            )
        self.lm = lm
        self._chunk_size = chunk_size
        self._vocab_size = vocab_size
        self._entropy_grad = entropy_grad
        self.use_attention(SDPA)

    def use_attention(self, kind: AttentionKind) -> None:
        """Attend as `kind` does from now on."""
        kind.prepare()
        self.lm.set_attn_implementation(kind.implementation)
        self._attention = kind

    def forward(self, row: PackedRow, *, by_transformers: bool = False) -> TrainedLogprobs:
        """Return log-probs and entropies of the trained tokens.

        The head's weight is used inside this module's forward because only there, with the
        embeddings it may be tied to, is it whole on every rank. `by_transformers` takes the
        model's own logits instead: what a check compares with.
        """
        if by_transformers:
            return self._by_transformers(row)
        output = self.lm.base_model(**self._arguments(row))
        hidden_M = output.last_hidden_state[0].index_select(0, row.trained_M - 1)
        return TrainedLogprobs(
            *chunked_logprobs(
                hidden_M,
                self.lm.get_output_embeddings().weight,
                row.token_ids_T[row.trained_M],
                row.temperatures_M,
                chunk_size=self._chunk_size,
                vocab_size=self._vocab_size,
                entropy_grad=self._entropy_grad,
            )
        )

    def _by_transformers(self, row: PackedRow) -> TrainedLogprobs:
        output = self.lm(**self._arguments(row))
        logits_MV = output.logits[0].index_select(0, row.trained_M - 1).float()
        all_MV = (logits_MV / row.temperatures_M[:, None]).log_softmax(-1)
        targets_M = row.token_ids_T[row.trained_M]
        return TrainedLogprobs(
            all_MV.gather(1, targets_M[:, None])[:, 0], -(all_MV.exp() * all_MV).sum(-1)
        )

    def _arguments(self, row: PackedRow) -> dict[str, object]:
        return {
            "input_ids": row.token_ids_T[None],
            "position_ids": row.sequences.positions_T[None],
            "use_cache": False,
            **self._attention.arguments(row.sequences),
        }
