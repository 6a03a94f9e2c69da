"""Trains a step on the CPU and on an emulated GPU, for each case, and writes what tests compare.

usage: steps.py FOLDER CASE..., with the library of device.py loaded and TRITON_INTERPRET=1.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import device
import numpy as np
import torch
from backend_cases import (
    VOCAB,
    backend_settings,
    exported_gradient,
    relative_difference,
    samples,
)
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from telescope_train.backends.step_loss import StepLoss
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection
from telescope_train.diagnostics import rank_checks
from telescope_train.models.tiny import character_tokenizer
from telescope_train.trainer.worker import TrainerWorker

FOLDER = Path(sys.argv[1])
MODEL, WHOLE = FOLDER / "model", FOLDER / "whole"
SHARED = 16
"""Tokens with which all samples begin: no fewer are worth being computed once."""
TOLD = ("early", "waits", "sent", "attention", "shares", "room", "failed_tests")


def save_model():
    """Few heads and one layer, because the interpreter runs each program of a kernel in Python."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, **heads)).save_pretrained(MODEL)
    # Its embeddings have a buffer, so it cannot be read in parts: it is loaded whole.
    config = Gemma3TextConfig(vocab_size=VOCAB, sliding_window=16, **sizes, **heads)
    Gemma3ForCausalLM(config).save_pretrained(WHOLE)
    for folder in (MODEL, WHOLE):
        character_tokenizer().save_pretrained(folder)


def settings_of(case, kind):
    halves, alone = {"mixed_precision_dtype": "bfloat16"}, {"share_prefixes": False}
    if case == "bfloat16":
        settings = backend_settings(MODEL, records=True)
        settings = replace(settings, model=settings.model.model_copy(update=halves))
    elif case == "loaded whole":
        section = AlgorithmSection(kl_penalty_tau=0.1, use_tis=True)
        settings = backend_settings(WHOLE, optimizer="muon", **alone)
        settings = replace(settings, algorithm=section)
        settings = replace(settings, model=settings.model.model_copy(update=halves))
    else:
        # Of a CPU, the optimizer cannot be moved there.
        moved = {"optimizer_cpu_offload": kind == "cuda"}
        adapted = {"use_lora": True, "lora_rank": 4, "gradient_checkpointing": "auto"}
        section = AlgorithmSection(kl_penalty_tau=0.1, use_tis=True)
        settings = replace(backend_settings(MODEL, **moved, **adapted, **alone), algorithm=section)
    # As beside a resident server.
    return replace(settings, device=kind, gpu_share=0.5)


def batches_of(*, share_prefixes):
    """Return two rows of samples; each token is a program of several kernels."""
    length = SHARED if share_prefixes else 0
    shared, nothing = np.arange(length, dtype=np.int32), np.full(length, np.nan, dtype="f4")
    made = [
        replace(
            one,
            token_ids=np.concatenate([shared, one.token_ids]),
            mask=np.concatenate([np.zeros(length, dtype=bool), one.mask]),
            behavior_logprobs=np.concatenate([nothing, one.behavior_logprobs]),
        )
        for one in samples(3)
    ]
    (found,) = pack(
        made,
        token_weights(made, "token", max_tokens=64),
        seq_len=40 + 2 * length,
        num_ranks=1,
        hidden_size=64,
        share_prefixes=share_prefixes,
    )
    return found


def trained(case, kind):
    """Return what a rank on this device says of a step, and of its checkpoint."""
    settings = settings_of(case, kind)
    worker = TrainerWorker(settings)
    try:
        batches = batches_of(share_prefixes=case == "bfloat16")
        if settings.algorithm.needs_reference:
            reference = worker.backend.reference_logprobs(batches)
            batches = [
                replace(one, reference_logprobs_T=found)
                for one, found in zip(batches, reference, strict=True)
            ]
        gradient: dict[str, np.ndarray] = {}
        accumulate, apply = worker.backend.accumulate_gradient, worker.backend.apply_gradient

        def counted(*args, **kwargs):
            device.waits.clear()
            early.clear()
            return accumulate(*args, **kwargs)

        def kept_and_applied():
            gradient.update(exported_gradient(worker))
            return apply()

        # One step says all, because each pass over the layers takes seconds here.
        worker.backend.accumulate_gradient = counted
        worker.backend.apply_gradient = kept_and_applied
        metrics = worker.train_step(batches, version=0)
        waits = dict(device.waits)
        after = worker.logprobs(batches)
        folder = FOLDER / f"{case}-{kind}"
        worker.start_checkpoint(folder, True)
        worker.finish_checkpoint()
        for parameter in worker.backend._policy.parameters():
            if parameter.requires_grad:
                parameter.detach().zero_()
        worker.load_checkpoint(folder)
        worker.save_pretrained(FOLDER / f"{case}-{kind}-model")
        return {
            "gradient": gradient,
            "logprobs": after,
            "restored": worker.logprobs(batches),
            "metrics": {
                name: value
                for name, value in metrics.items()
                if not name.startswith(("time/", "activations/"))
            },
            "early": dict(early),
            "waits": waits,
            "sent": sorted({value.device.type for _, value in worker.backend.transfer_weights()}),
            "attention": worker.backend.attention.kind.name,
            "room": worker.activations,
            "shares": any(one.shared_S is not None for one in batches),
            "failed_tests": [one.name for one in worker.self_tests if one.value > one.limit],
        }
    finally:
        worker.close()


def furthest(some, others):
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


early: dict[str, int] = {}
"""What had waited when the last backward pass of a step was over, before numbers were read."""


def main():
    read = StepLoss.after_backward

    def after_backward(losses):
        early.update(device.waits)
        read(losses)

    StepLoss.after_backward = after_backward
    save_model()
    device.install()
    for case in sys.argv[2:]:
        # Few tokens, as in the batches; a row holds the longest sample of the test of sharing.
        rank_checks.LENGTHS = (16, 5) if case == "bfloat16" else (7, 5)
        host = trained(case, "cpu")
        with device.Emulated():
            gpu = trained(case, "cuda")
        told = {
            "gradient": relative_difference(gpu["gradient"], host["gradient"]),
            "logprobs": furthest(gpu["logprobs"], host["logprobs"]),
            "restored": furthest(gpu["restored"], gpu["logprobs"]),
            "metrics": [host["metrics"], gpu["metrics"]],
            **{name: gpu[name] for name in TOLD},
        }
        (FOLDER / f"{case}.json").write_text(json.dumps(told))


main()
