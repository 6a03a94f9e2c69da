"""One packed row through a causal language model, to the log-probs of the trained tokens.

`PackedRow` is a PackedBatch ready for a device; `PackedPolicy` is the module that is sharded and
called. Only positions that predict a trained token reach the output head.
Dims: T tokens of the row, M trained tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from telescope_core.errors import ConfigError
from telescope_train.batch import PackedBatch
from telescope_train.logprobs import chunked_logprobs
from telescope_train.models.attention import PACKED_ATTENTION, PackedLayout, packed_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The model's view of one PackedBatch, without the padding at its end."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    layout: PackedLayout
    sequence_starts: torch.Tensor
    """int32 [S + 1] cumulative lengths, as varlen kernels want them."""
    longest: int
    trained_M: torch.Tensor
    """Index of each trained token."""
    temperatures_M: torch.Tensor


class TrainedLogprobs(NamedTuple):
    """What the policy says of the trained tokens."""

    logprobs_M: torch.Tensor
    entropy_M: torch.Tensor


def packed_row(batch: PackedBatch, device: torch.device) -> PackedRow:
    """Prepare `batch` for the model.

    A row of nothing but padding keeps two tokens, one of them trained with weight 0: every rank
    must run the same collectives, forward and backward.
    """
    num_tokens = batch.num_tokens
    trained_M = np.flatnonzero(batch.mask_T)
    positions_T = batch.positions_T[:num_tokens]
    if num_tokens == 0:
        num_tokens, positions_T = 2, np.arange(2)
    if len(trained_M) == 0:
        trained_M = np.flatnonzero(positions_T > 0)[:1]
    assert (positions_T[trained_M] > 0).all(), (
        "the first token of a sample has nothing to be predicted from: it cannot be trained"
    )
    starts = np.append(np.flatnonzero(positions_T == 0), num_tokens)
    return PackedRow(
        token_ids_T=torch.tensor(batch.token_ids_T[:num_tokens], dtype=torch.long).to(device),
        positions_T=torch.tensor(positions_T, dtype=torch.long).to(device),
        layout=packed_layout(positions_T, device),
        sequence_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
        longest=int(np.diff(starts).max()),
        trained_M=torch.from_numpy(trained_M).to(device),
        temperatures_M=torch.tensor(batch.temperatures_T[trained_M]).to(device),
    )


class PackedPolicy(torch.nn.Module):
    """A causal language model that answers a PackedRow with log-probs."""

    def __init__(self, lm: PreTrainedModel, *, chunk_size: int, vocab_size: int) -> None:
        super().__init__()
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            raise ConfigError(
                f"{type(lm).__name__} has a bias in its output head; this version cannot train it"
            )
        self.lm = lm
        self._chunk_size = chunk_size
        self._vocab_size = vocab_size

    def forward(self, row: PackedRow, *, by_transformers: bool = False) -> TrainedLogprobs:
        """Return log-probs and entropies of the trained tokens.

        The head's weight is used inside this module's forward because only there, with the
        embeddings it may be tied to, is it whole on every rank. `by_transformers` takes the
        model's own logits instead: what a check compares with.
        """
        if by_transformers:
            return self._by_transformers(row)
        output = self.lm.base_model(
            input_ids=row.token_ids_T[None],
            position_ids=row.positions_T[None],
            use_cache=False,
            **self._attention_arguments(row),
        )
        hidden_M = output.last_hidden_state[0].index_select(0, row.trained_M - 1)
        return TrainedLogprobs(
            *chunked_logprobs(
                hidden_M,
                self.lm.get_output_embeddings().weight,
                row.token_ids_T[row.trained_M],
                row.temperatures_M,
                chunk_size=self._chunk_size,
                vocab_size=self._vocab_size,
            )
        )

    def _by_transformers(self, row: PackedRow) -> TrainedLogprobs:
        output = self.lm(
            input_ids=row.token_ids_T[None],
            position_ids=row.positions_T[None],
            use_cache=False,
            **self._attention_arguments(row),
        )
        logits_MV = output.logits[0].index_select(0, row.trained_M - 1).float()
        all_MV = (logits_MV / row.temperatures_M[:, None]).log_softmax(-1)
        targets_M = row.token_ids_T[row.trained_M]
        return TrainedLogprobs(
            all_MV.gather(1, targets_M[:, None])[:, 0], -(all_MV.exp() * all_MV).sum(-1)
        )

    def _attention_arguments(self, row: PackedRow) -> dict[str, object]:
        if self.lm.config._attn_implementation == PACKED_ATTENTION:
            return {"packed_layout": row.layout}
        if self.lm.config._attn_implementation.startswith("flash_attention"):
            return {
                "cu_seq_lens_q": row.sequence_starts,
                "cu_seq_lens_k": row.sequence_starts,
                "max_length_q": row.longest,
                "max_length_k": row.longest,
            }
        return {}
