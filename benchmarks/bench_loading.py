"""What each of two trainer ranks holds at most while it loads a random model of 1.9e9 numbers.

The model has the shape of Qwen3-1.7B with four more layers, in bfloat16, in one file per layer. Two
processes load it as a rank does (`load_policy`, FSDP2 over gloo), and a third one reads their
anonymous memory every few milliseconds: pages of mapped files can be dropped, so they do not count.
The limit is 1.2 times a rank's shard plus the largest tensor.

usage: bench_loading.py [--layers N] [--ranks N] [--folder FOLDER]
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from machine import facts_of_run, table, write_results
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.backends.fsdp.policy import load_policy
from telescope_train.backends.protocol import BackendSettings
from telescope_train.config.schema import ModelSection
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.trainer.worker import keep_freed_memory

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
LOOK_EVERY_S = 0.005
GIB = 2**30
PAGE = """# Memory of loading a model

{{facts}}

{rows}

Anonymous memory beyond what the process had before, looked at every 5 ms. The limit is 1.2 times
the shard plus the largest tensor; a whole model would be {whole:.2f} GiB.
"""


def main() -> None:
    """Write the model, load it on all ranks, and write what they held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Path(folder)
        num_numbers = write_random_model(model, options.layers)
        rows = load_on_all(model, options.ranks)
    shown = [
        [
            str(row["rank"]),
            f"{row['shard'] / GIB:.2f}",
            f"{row['largest'] / GIB:.2f}",
            f"{row['peak'] / GIB:.2f}",
            f"{row['limit'] / GIB:.2f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    head = ["rank", "shard, GiB", "largest tensor, GiB", "peak, GiB", "limit, GiB", "seconds"]
    command = f"benchmarks/bench_loading.py --layers {options.layers} --ranks {options.ranks}"
    facts = facts_of_run(command, "torch", "transformers", "safetensors")
    facts["parameters"] = num_numbers
    page = PAGE.format(rows=table(head, shown), whole=2 * num_numbers / GIB)
    write_results("loading", page.replace("{{facts}}", "{facts}"), facts, rows)
    print(table(head, shown))
    if any(row["peak"] >= row["limit"] for row in rows):
        raise SystemExit("a rank held more than the limit")


def write_random_model(folder: Path, num_layers: int) -> int:
    """Write a model of bfloat16 numbers, a layer at a time; returns how many numbers it has."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    parts: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, value in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(f"model-{layer}.safetensors", []).append((name, value.shape))
    for file, tensors in parts.items():
        save_file(
            {name: (torch.rand(shape) * 0.04).bfloat16() for name, shape in tensors},
            folder / file,
            metadata={"format": "pt"},
        )
    weight_map = {name: file for file, tensors in parts.items() for name, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(shape.numel() for tensors in parts.values() for _, shape in tensors)


def load_on_all(model: Path, num_ranks: int) -> list[dict[str, float]]:
    """Return what each rank held at most beyond what it had before, in bytes."""
    loading = [FORK.Process(target=load, args=(n, num_ranks, model)) for n in range(num_ranks)]
    for one in loading:
        one.start()
    most = [0] * num_ranks
    while not wait([one.sentinel for one in loading], timeout=LOOK_EVERY_S):
        for rank, one in enumerate(loading):
            most[rank] = max(most[rank], anonymous_bytes(str(one.pid)))
    for one in loading:
        one.join()
        if one.exitcode:
            raise SystemExit(f"a rank failed with exit code {one.exitcode}")
    rows = [json.loads((model / f"loaded-{n}.json").read_text()) for n in range(num_ranks)]
    for row, held in zip(rows, most, strict=True):
        row["peak"] = held - row.pop("before")
        row["limit"] = 1.2 * row["shard"] + row["largest"]
    return rows


def load(rank: int, num_ranks: int, model: Path) -> None:
    """Load as a rank does, and write what it has then."""
    torch.set_num_threads(1)
    settings = BackendSettings(
        model=ModelSection(
            model=str(model), model_dtype="bfloat16", mixed_precision_dtype="bfloat16"
        ),
        trainer=TrainerSection(trainer_num_workers=num_ranks),
        algorithm=None,
        seed=0,
        number_of_steps=1,
        device="cpu",
    )
    store = dist.FileStore(str(model / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    keep_freed_memory()  # as a rank does
    before, began_s = anonymous_bytes("self"), time.monotonic()
    policy = load_policy(settings, CPU, fsdp_layout(settings.trainer, num_ranks)).policy
    seconds = time.monotonic() - began_s
    time.sleep(5 * LOOK_EVERY_S)  # the last state is looked at, too
    facts = {
        "rank": rank,
        "before": before,
        "shard": sum(value.to_local().nbytes for value in policy.parameters()),
        "largest": max(value.nbytes for value in policy.parameters()),
        "seconds": seconds,
    }
    (model / f"loaded-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()  # whoever ends first ends the looking
    dist.destroy_process_group()


def anonymous_bytes(process: str) -> int:
    """Return the memory of a process that no file backs; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
