"""How much of a LoRA update a bfloat16 model shows: merged and rounded in two ways, or computed.

No engine: transformers computes the log-probs of random tokens. Run:
python benchmarks/bench_lora_rounding.py [--quick]
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from machine import facts_of_run, table, write_results
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from telescope_train.config.schema import TrainerSection
from telescope_train.models.lora import adapted_modules, merged
from telescope_train.models.rounding import round_steadily
from telescope_train.models.tiny import make_tiny_model

COMMAND = "OMP_NUM_THREADS=2 python benchmarks/bench_lora_rounding.py"
RATE = 1e-5
STEPS = (1, 10, 40)
NOTE = f"""\
# What a bfloat16 model shows of a LoRA update

Frozen weights that bfloat16 holds exactly, adapters of rank 16 on all matrices in float32, AdamW
at {RATE:g}, noise as advantages. `moved` is the root mean square of the change of log-probs in
float32, in nats. The next three columns are the share of that change which the model in bfloat16
shows: the slope of its change over the true one, with the standard error. `off` is the mean
difference of its log-probs to the true ones, and `apart` that to those of `adapter`, in nats.
`nearest`: matrices with the adapter added, rounded to nearest. `steady`: rounded as Telescope sends
them to a bfloat16 server. `adapter`: the adapter computed in bfloat16 beside the matrices, as peft
and vLLM do.

{{facts}}
"""


class Case(NamedTuple):
    """A model, and the tokens whose log-probs are looked at."""

    name: str
    num_texts: int
    length: int


CASES = (Case("tiny, 0.6M", 32, 200), Case("10 layers of 576", 8, 128))


def load(case: Case) -> PreTrainedModel:
    """Return a random model in float32 whose weights bfloat16 holds exactly."""
    if case is CASES[0]:
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_model(Path(folder) / "tiny", seed=1)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=8192,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=10,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
    return model.to(torch.bfloat16).float().eval()


def logprobs(model: PreTrainedModel, ids_NT: Tensor) -> Tensor:
    """Return the log-prob of every token but the first of each text, nats, float64."""
    with torch.no_grad():
        parts = [_logprobs(model, part) for part in ids_NT.split(8)]
    return torch.cat(parts).double().flatten()


def _logprobs(model: PreTrainedModel, ids_NT: Tensor) -> Tensor:
    logits = model(ids_NT).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids_NT[:, 1:, None])[..., 0]


def with_matrices(
    base: PreTrainedModel, lm: PreTrainedModel, rounded: Callable[[Tensor, str], Tensor]
) -> PreTrainedModel:
    """Return `base` in bfloat16 with the adapters of `lm` merged and `rounded`."""
    narrow = copy.deepcopy(base).bfloat16()
    for name, module in adapted_modules(lm).items():
        wide = merged(module.base_layer.weight.detach(), module, lambda value: value.detach())
        narrow.get_submodule(name).weight.data = rounded(wide, name)
    return narrow


def measure(case: Case, steps: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Train, and look after each number of `steps`."""
    base = load(case)
    targets = list(TrainerSection().lora_target_modules)
    settings = LoraConfig(r=16, lora_alpha=32, target_modules=targets)
    lm = inject_adapter_in_model(settings, copy.deepcopy(base))
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("lora_" in name)
    torch.manual_seed(1)
    ids_NT = torch.randint(0, base.config.vocab_size, (case.num_texts, case.length))
    advantages_N = torch.randn(case.num_texts)
    trained = [one for one in lm.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    before, before_narrow = logprobs(base, ids_NT), logprobs(copy.deepcopy(base).bfloat16(), ids_NT)
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        for ids, some in zip(ids_NT.split(8), advantages_N.split(8), strict=True):
            (-(_logprobs(lm, ids) * some[:, None]).sum() / case.num_texts).backward()
        optimizer.step()
        if step not in steps:
            continue
        after = logprobs(lm, ids_NT)
        moved = after - before
        row: dict[str, object] = {"model": case.name, "step": step, "moved": _rms(moved)}
        by_trainer = logprobs(copy.deepcopy(lm).bfloat16(), ids_NT)
        for way, narrow in (
            ("nearest", with_matrices(base, lm, lambda wide, _: wide.bfloat16())),
            ("steady", with_matrices(base, lm, round_steadily)),
            ("adapter", copy.deepcopy(lm).bfloat16()),
        ):
            shown = logprobs(narrow, ids_NT)
            change = shown - before_narrow
            row[f"{way}_share"] = float(change @ moved / (moved @ moved))
            row[f"{way}_error"] = _rms(change - moved) / float(moved.norm())
            row[f"{way}_off"] = float((shown - after).abs().mean())
            row[f"{way}_apart"] = float((shown - by_trainer).abs().mean())
        yield row


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


WAYS = ("nearest", "steady", "adapter")
HEAD = (
    *("model", "steps", "moved", *WAYS),
    *(f"{way}, off" for way in WAYS),
    *(f"{way}, apart" for way in WAYS[:2]),
)


def as_cells(row: dict) -> list[str]:
    """Return one line of the table."""
    return [
        *(row["model"], str(row["step"]), f"{row['moved']:.4f}"),
        *(f"{row[f'{way}_share']:.2f} +- {row[f'{way}_error']:.2f}" for way in WAYS),
        *(f"{row[f'{way}_off']:.4f}" for way in WAYS),
        *(f"{row[f'{way}_apart']:.4f}" for way in WAYS[:2]),
    ]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model; write no results")
    is_quick = parser.parse_args().quick
    facts = facts_of_run(COMMAND, "torch", "transformers", "peft")
    rows = []
    for case in CASES[:1] if is_quick else CASES:
        for row in measure(case, STEPS[:2] if is_quick else STEPS):
            rows.append(row)
            print(" | ".join(as_cells(row)), flush=True)
    if not is_quick:
        page = NOTE + "\n" + table(HEAD, [as_cells(row) for row in rows])
        write_results("lora_rounding", page, facts, rows)


if __name__ == "__main__":
    main()
