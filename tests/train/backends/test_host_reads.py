"""No row and no layer asks a GPU for a number, for which the host would wait.

On the device "meta" tensors have no numbers, so whoever asks for one fails.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import grpo_batches

from telescope_train.backends.megatron import layers
from telescope_train.backends.megatron.backend import MegatronBackend
from telescope_train.backends.megatron.library import using
from telescope_train.backends.megatron.model import run_model
from telescope_train.backends.megatron.rows import rank_row
from telescope_train.cluster.rank_layout import ONE_RANK
from telescope_train.config.trainer_section import MegatronSection, TrainerSection
from telescope_train.models import packed
from telescope_train.models.row import packed_row

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def batch():
    return grpo_batches(seq_len=64)[0][0]


@pytest.mark.engine
def test_rotations_get_the_borders_of_sequences_from_the_host(batch):
    row = rank_row(batch, META, ranks=2, rank=1, multiple_of=8)
    expected = rank_row(batch, CPU, ranks=2, rank=1, multiple_of=8).sequences.starts
    with using(CPU):
        given = run_model(lambda **given: given["packed_seq_params"], row)
    assert given.cu_seqlens_q.tolist() == given.cu_seqlens_kv.tolist() == expected.tolist()


@pytest.mark.engine
@pytest.mark.parametrize("engine_attends", [False, True])
def test_borders_are_where_the_attention_reads_them(batch, engine_attends):
    """Transformer Engine passes their address on to kernels, which cannot read the host's."""
    section = MegatronSection(megatron_use_transformer_engine=engine_attends)
    backend = SimpleNamespace(
        _settings=SimpleNamespace(megatron=section, trainer=TrainerSection()),
        _loaded=SimpleNamespace(
            layout=ONE_RANK, context_rank=0, architecture=SimpleNamespace(vocab_size=10**6)
        ),
        _device=META,
    )
    row = MegatronBackend._row(backend, batch)
    with using(CPU):
        given = run_model(lambda **given: given["packed_seq_params"], row)
    expected = META if engine_attends else CPU
    assert given.cu_seqlens_q.device == given.cu_seqlens_kv.device == expected
    assert given.cu_seqlens_q.dtype == torch.int32


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_finds_its_tokens_on_the_host(batch, monkeypatch, rank):
    seen = {}

    def run(device):
        row = packed_row(batch, device, multiple_of=2)
        length = len(row.token_ids_T)
        mine = slice(rank * length // 2, (rank + 1) * length // 2)
        hidden = torch.zeros(1, length // 2, 4, device=device)
        policy = SimpleNamespace(
            _context=SimpleNamespace(slice_of=lambda _: mine, group=None),
            _replay_routes=lambda _: None,
            _arguments=lambda *_: {},
            _head=lambda: None,
            lm=SimpleNamespace(base_model=lambda: SimpleNamespace(last_hidden_state=hidden)),
            **{"_chunk_size": 4, "_entropy_grad": False, "_wide_logits": True},
        )
        packed.PackedPolicy.forward(policy, row)
        return row, mine

    def spy(hidden_TH, head, targets_T, temperatures_T, **_):
        seen["targets"] = targets_T
        return temperatures_T, temperatures_T

    monkeypatch.setattr(packed, "chunked_logprobs", spy)
    monkeypatch.setattr(packed.GatherTokens, "apply", lambda values, places, *_: places)
    run(META)
    number = len(seen["targets"])
    row, mine = run(CPU)
    predictors = row.predictors_M.numpy()
    inside = (predictors >= mine.start) & (predictors < mine.stop)
    assert number == inside.sum() > 0
    assert np.array_equal(seen["targets"].numpy(), row.targets_M.numpy()[inside])


def test_the_tokens_of_experts_are_moved_as_rows_are(monkeypatch):
    """From pinned memory; a plain copy waits for the GPU."""
    moved, used = [], []

    def to_device(values, device):
        moved.append((values.tolist(), device))
        return torch.from_numpy(values)

    monkeypatch.setattr(layers, "to_device", to_device)
    monkeypatch.setattr(
        layers,
        "_grouped_product",
        lambda states, _, counts: (used.append(counts.tolist()), states)[1],
    )
    layers.GroupedExperts.forward(
        SimpleNamespace(fc1=None, fc2=None),
        torch.zeros(3, 4, device=META),
        torch.tensor([1, 2]),
        torch.zeros(3, device=META),
    )
    assert moved == [([1, 2], META)]
    assert used == [[1, 2], [1, 2]]
