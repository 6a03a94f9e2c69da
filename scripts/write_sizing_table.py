"""Writes docs/reference/sizing.md from the arithmetic of the dry run; a test keeps it current."""

from itertools import product
from pathlib import Path
from typing import Any

from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import MegatronSection
from telescope_train.models.facts import facts_of
from telescope_train.plan.gpus import CONTEXT_BYTES, memory_problems
from telescope_train.plan.memory import rank_memory

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "sizing.md"
GPU_BYTES = 80 * 10**9
MOST_RANKS = 256
LIMIT = 4096
"""Tokens of prompt and answer together, and of a packed sequence."""
SHAPES = {
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12_288, False),
    "14B": (5120, 40, 40, 17_408, False),
    "32B": (5120, 64, 64, 25_600, False),
    "72B": (8192, 80, 64, 29_568, False),
}
"""Parameters of Qwen3 models -> hidden size, layers, heads, width of the MLP, tied embeddings.

The last is the size of Qwen2.5 and of Llama 3 70B, with the layers of Qwen3."""
MIXTURES = {
    "30B-A3B": (2048, 48, 32, 6144, 768),
    "235B-A22B": (4096, 94, 64, 12_288, 1536),
}
"""Mixtures of 128 experts -> hidden size, layers, heads, widths of an MLP and of an expert."""
WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "`adamw_bf16`": {"optimizer": "adamw_bf16"},
    "`optimizer_cpu_offload`": {"optimizer_cpu_offload": True},
    "`use_lora`": {"use_lora": True},
}
HEAD = """# Sizing

How many GPUs of 80 GB a trainer needs for each model, with packed sequences of 4,096 tokens and
`gradient_checkpointing`, and the memory of one rank then. Servers come on top: one GPU each for
models of up to 32B; `inference_tensor_parallel_size` divides a larger model, and the cache of its
requests, among the GPUs of a server. The last column is whether server and trainer fit one GPU
together (`colocate`), with the largest optimizer setting of the row that does. 72B stands for
models of the size of Qwen2.5 72B and Llama 3 70B.

These are sums of the dry run, not measurements: activations are an estimate, and 2 GiB are counted
for what CUDA takes beside tensors. `telescope train run.toml --dry-run` computes them for your
settings. Written by `scripts/write_sizing_table.py`.
"""


MEGATRON = """
With `train_backend = "megatron"`, the layout with the fewest GPUs, among them the least tensor,
then pipeline, then expert parallelism, in bfloat16 with the distributed optimizer and
`megatron_gradient_checkpointing`. 30B-A3B and 235B-A22B are the mixtures of 128 experts.

"""
GROWTH = """
## What grows while a run goes on

A run needs the same memory at step 10,000 as at step 10, apart from Ray's `gcs_server`, which
grew by 16 KiB a step. On disk it grows. Rollouts (`rollouts/`), attempts that were played again
(`attempts/`), what the trainer found of tokens (`token_facts/`) and events (`events/`) have a
file for each new step and [one for a hundred old ones](run-folder.md#files-of-many-steps), as
long as each is smaller than 4 MiB. Everything else is in files that hold many steps, and a rank
or a server more is a log more. So 10,000 steps of few or short rollouts are about 800 files,
besides those of evals and checkpoints. Steps with 4 MiB of rollouts or more keep a file each:
think of that where a file system limits their number, and pack the folders of runs that have
ended.

With 16 short rollouts a step, a run folder grew by 36 KiB a step over 1,600 steps, most of it
in these files. In longer rollouts, each token that the model wrote takes 5 to 7 bytes in
`rollouts/` and about 5 in `token_facts/`. A checkpoint has the size of the trainer's state
([saving](../how-to/resume-and-checkpoints.md#saving)); `checkpoint_keep_last` bounds how many
there are.
"""


def qwen3(size: str) -> dict[str, Any]:
    """Return what `config.json` of the model says."""
    hidden, layers, heads, width, tied = SHAPES[size]
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


def mixture(size: str) -> dict[str, Any]:
    """Return what `config.json` of the mixture says."""
    hidden, layers, heads, width, expert_width = MIXTURES[size]
    return {
        **qwen3("8B"),
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "intermediate_size": width,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_width,
    }


def config(trainer: dict[str, Any], **inference: Any) -> TrainConfig:
    """Return the settings of a run."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "sizing", "number_of_steps": 1},
            "model": {"model": "qwen3"},
            "environments": [{"name": "any"}],
            "trainer": {"seq_len": LIMIT, **trainer},
            "inference": inference,
        }
    )


def ranks_text(size: str, way: dict[str, Any]) -> str:
    """Return the fewest GPUs that hold the trainer, and the memory of a rank on them."""
    facts, ranks = facts_of(qwen3(size)), 1
    while ranks <= MOST_RANKS:
        rank = rank_memory(config({"trainer_num_workers": ranks, **way}), facts, device="cuda")
        assert rank is not None
        needed = rank.total_bytes + CONTEXT_BYTES
        if needed <= GPU_BYTES:
            return f"{ranks} ({needed / 2**30:.0f} GiB)"
        ranks *= 2
    return f"more than {MOST_RANKS}"


def shared_text(size: str) -> str:
    """Return with which setting the whole run fits one GPU."""
    facts = facts_of(qwen3(size))
    for name, way in WAYS.items():
        for percent in range(90, 0, -5):
            fits = config(way, colocate=True, gpu_memory_utilization=percent / 100)
            if not list(memory_problems(fits, facts, LIMIT, GPU_BYTES)):
                return f"{name}, `gpu_memory_utilization` {percent / 100:g}"
    return "no"


def megatron_row(name: str, model: dict[str, Any]) -> list[str]:
    """Return the layout of fewest GPUs that holds the trainer, and the memory of a rank."""
    facts, experts = facts_of(model), (1, 2, 4, 8, 16, 32) if "num_experts" in model else (1,)
    for ranks in (1, 2, 4, 8, 16, 32, 64, 128, MOST_RANKS):
        for tensor, pipeline, expert in product((1, 2, 4, 8), (1, 2, 4), experts):
            if ranks % (tensor * pipeline) or (ranks // pipeline) % expert:
                continue
            if model["num_hidden_layers"] % pipeline:
                continue
            trainer = {"train_backend": "megatron", "trainer_num_workers": ranks}
            run = config(trainer).model_copy(
                update={
                    "megatron": MegatronSection(
                        megatron_tensor_parallel_size=tensor,
                        megatron_pipeline_parallel_size=pipeline,
                        megatron_expert_parallel_size=expert,
                    )
                }
            )
            rank = rank_memory(run, facts, device="cuda")
            assert rank is not None
            needed = rank.total_bytes + CONTEXT_BYTES
            if needed <= GPU_BYTES:
                sizes = [str(one) for one in (ranks, tensor, pipeline, expert)]
                return [name, *sizes, f"{needed / 2**30:.0f} GiB"]
    return [name, f"more than {MOST_RANKS}", "", "", "", ""]


def table(lines: list[list[str]]) -> str:
    """Return lines of cells; the first is the head."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled) + "\n"


def reference() -> str:
    """Return the page."""
    names = [*WAYS, "one GPU for all"]
    rows = [
        [size, *(ranks_text(size, way) for way in WAYS.values()), shared_text(size)]
        for size in SHAPES
    ]
    models = {size: qwen3(size) for size in SHAPES} | {size: mixture(size) for size in MIXTURES}
    head = ["Qwen3", "GPUs", "tensor", "pipeline", "expert", "memory of a rank"]
    megatron = [megatron_row(name, model) for name, model in models.items()]
    tables = f"{table([['Qwen3', *names], *rows])}{MEGATRON}{table([head, *megatron])}"
    return f"{HEAD}\n{tables}{GROWTH}"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
