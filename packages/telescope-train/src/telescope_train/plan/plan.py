"""The dry run: what `telescope train` would do, derived from a prepared run.

`text` turns a plan into text. Imports no torch, transformers or ray.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.secret_names import which_are_set
from telescope_train.algorithms.corrections import age_of_rollouts
from telescope_train.backends.megatron.layout import why_not_shared
from telescope_train.chat.template import how_replies_are_read
from telescope_train.checkpoints.folders import checkpoints_folder
from telescope_train.config.fields import was_set
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.run_folder import run_folder
from telescope_train.config.schema import EVAL_SAMPLES, EvalEntry, TrainConfig
from telescope_train.models.facts import ModelFacts
from telescope_train.models.recomputed_layers import LayerBytes, fewest_recomputed, kept_bytes
from telescope_train.models.served_adapter import served_adapter
from telescope_train.plan.gpus import CONTEXT_BYTES
from telescope_train.plan.memory import (
    ACTIVATIONS,
    BYTES_PER_VALUE,
    MemoryPlan,
    layer_bytes,
    memory_of,
    rank_memory,
)
from telescope_train.plan.notes import notes_of
from telescope_train.plan.prepared import Prepared
from telescope_train.rollouts.environments import worker_plans
from telescope_train.step.stream_rules import how_gradients_are_taken

GIB = 2**30
_WORDS = {
    False: "all kept",
    True: "recomputed in the backward pass, layer by layer",
    "full": "recomputed in the backward pass, layer by layer",
    "selective": "recomputed, except those of attention and matrix products",
}
_GPU_SHARE = 0.9
"""Share of a GPU's memory that ranks use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A kind of process of the run."""

    name: str
    count: int
    """Number of processes of this kind."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentShare:
    """The part of one environment in a step, on average."""

    name: str
    version: str
    share: float
    """Share of the prompts, 0 to 1."""
    groups: float
    """Prompts per step, on average."""
    group_size: int
    """Rollouts of one prompt."""

    @property
    def rollouts(self) -> float:
        """Average number of rollouts per step."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """One evaluation and its time."""

    name: str
    when: str
    num_rollouts: int
    """Number of rollouts each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All content of a dry run."""

    run_folder: str
    model: str
    num_parameters: int | None
    """None = not known before the model is downloaded."""
    reference: str | None
    """Name of `reference_model`; None = there is none."""
    num_reference_parameters: int | None
    """None = there is none, or it is not known before it is downloaded."""
    num_steps: int
    """Number of steps."""
    begins: tuple[str, ...]
    """The point at which the run continues, and changes since then; empty = the beginning."""
    algorithm: str
    age_of_rollouts: str
    """The age of rollouts relative to the trained weights, and what corrects for it."""
    gradients: str
    """The time at which the gradient of a batch is computed, and why not earlier."""
    prompts: str
    """Whether common beginnings of rollouts are computed once."""
    activations: str
    """The activations that layers keep for the backward pass, and why."""
    replies: str
    """The parsers of the model's output."""
    lora: str | None
    """The form in which servers get an adapter, and its cost; None without `use_lora`."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    groups_per_step: int
    """Prompts of one step."""
    rollouts_per_step: float
    """Rollouts of one step, on average."""
    max_tokens_per_step: int
    """Tokens of one step if every rollout is as long as it may be."""
    processes: tuple[ProcessPlan, ...]
    environments: tuple[EnvironmentShare, ...]
    codes: Mapping[str, EnvironmentRecord]
    """Name in the settings -> record of its code; missing environments are left out."""
    secrets: Mapping[str, Mapping[str, bool]]
    """Name in the settings -> each secret that it declares and gets here, and whether it is set."""
    memory: tuple[MemoryPlan, ...]
    evals: tuple[EvalPlan, ...]
    outputs: tuple[tuple[str, str], ...]
    """Name in the run folder -> what is written there."""
    notes: tuple[str, ...]
    """Remarks for people who start it."""
    ray_address: str | None
    """The cluster of the run, which a dry run does not ask; None = this machine."""
    problems: tuple[str, ...]
    """Reasons why the run cannot start on this machine; empty if it can."""


def make_plan(prepared: Prepared) -> Plan:
    """Return the plan of the run; obstacles are in `problems`, and nothing is raised."""
    config = prepared.config
    codes = prepared.environments.records
    shares = _environment_shares(config, codes)
    rollouts = sum(share.rollouts for share in shares)
    limit, reference = prepared.max_model_len, prepared.facts.reference
    return Plan(
        run_folder=str(run_folder(config)),
        model=config.model.model,
        num_parameters=prepared.facts.num_parameters,
        reference=config.algorithm.reference_model,
        num_reference_parameters=reference and reference.num_parameters,
        num_steps=config.run.number_of_steps,
        begins=() if prepared.resume is None else tuple(prepared.resume.lines),
        algorithm=config.algorithm.algorithm,
        age_of_rollouts=age_of_rollouts(config),
        gradients=how_gradients_are_taken(config),
        prompts=_prompts(config, prepared.facts),
        activations=how_activations_are_kept(prepared),
        replies=how_replies_are_read(config.model),
        lora=_lora(config, prepared.dtype),
        max_model_len=limit,
        groups_per_step=config.rollout.prompts_batch_size_for_trainer,
        rollouts_per_step=rollouts,
        max_tokens_per_step=round(rollouts * limit),
        processes=_processes(prepared),
        environments=tuple(shares),
        codes=codes,
        secrets=_secrets(prepared.environments.secrets),
        memory=memory_of(config, prepared.facts, limit, device=prepared.device),
        evals=tuple(_eval_plan(config, entry) for entry in config.evals.evals),
        outputs=_outputs(config),
        notes=notes_of(prepared),
        ray_address=config.ray.ray_address,
        problems=prepared.problems,
    )


def _secrets(declared: Mapping[str, Sequence[str]]) -> dict[str, dict[str, bool]]:
    return {name: which_are_set(secrets, os.environ) for name, secrets in declared.items()}


def _environment_shares(
    config: TrainConfig, codes: Mapping[str, EnvironmentRecord]
) -> list[EnvironmentShare]:
    total = sum(entry.weight for entry in config.environments)
    shares: list[EnvironmentShare] = []
    for entry in config.environments:
        code = codes.get(entry.name)
        share = entry.weight / total
        shares.append(
            EnvironmentShare(
                name=entry.name,
                version=code.version if code is not None else "not installed",
                share=share,
                groups=share * config.rollout.prompts_batch_size_for_trainer,
                group_size=entry.group_size or config.rollout.group_size,
            )
        )
    return shares


def _prompts(config: TrainConfig, facts: ModelFacts) -> str:
    trainer = config.trainer
    if trainer.share_prefixes is False:
        return "computed for each rollout: share_prefixes is false"
    if trainer.train_backend == "megatron" and (reason := why_not_shared(config.megatron)):
        return f"computed for each rollout: {reason}"
    if facts.num_experts:
        return "computed for each rollout: the model is a mixture of experts"
    if trainer.use_lora and trainer.lora_dropout:
        return "computed for each rollout: lora_dropout is drawn for each"
    return "computed once for rollouts that begin alike, if a test of the model passes"


def _lora(config: TrainConfig, dtype: str) -> str | None:
    if not config.trainer.use_lora:
        return None
    if served_adapter(config) is None:
        rounding = ", rounded to be right on average" if dtype == "bfloat16" else ""
        return f"servers get the matrices of adapted blocks, merged{rounding}; sampling is as fast"
    loss = ", and in bfloat16 loses most of small changes" if dtype == "bfloat16" else ""
    return f"servers get the adapter and compute it with every token; that slows sampling{loss}"


def _processes(prepared: Prepared) -> tuple[ProcessPlan, ...]:
    config = prepared.config
    inference, trainer, ray = config.inference, config.trainer, config.ray
    first = inference.inference_base_port
    last = first + inference.inference_num_workers - 1
    ports = f"port {first}" if first == last else f"ports {first} to {last}"
    ports += "" if was_set(inference, "inference_base_port") else " or free ones after"
    own_host = LOOPBACK if ray.ray_address is None else "the address of its node"
    host = inference.inference_host or own_host
    size = inference.processes_per_server
    parts = f", {size} GPUs or processes each" if size > 1 else ""
    num_eval = config.evals.eval_num_servers
    num_older = inference.opponent_num_servers
    for_older = (
        f", {num_older} of them for older versions (the oldest is replaced every "
        f"{inference.opponent_update_every} steps)"
        if num_older
        else ""
    )
    for_evals = f", the last {num_eval} for evals" if num_eval else ""
    address = ray.ray_address
    shared = ""
    if inference.colocate is True:
        shared = ", in turn with the trainer on one GPU"
    elif inference.colocate == "resident":
        shared = f", {inference.gpu_memory_utilization:.0%} of the trainer's GPU, which both keep"
    kind = inference.inference_quantization
    bits = "" if kind == "none" else f", layers in 8 bits ({kind})"
    if prepared.dtype != "float32":
        bits += f", logits in {'float32' if config.model.fp32_lm_head else prepared.dtype}"
    return (
        ProcessPlan(name="driver", count=1, detail="this process: the loop and the gateway"),
        *(
            ProcessPlan(name="environment", count=worker.count, detail=worker.detail)
            for worker in worker_plans(prepared.environments.found)
        ),
        ProcessPlan(
            name="Ray",
            count=1,
            detail="started on this machine" if address is None else f"joined at {address}",
        ),
        ProcessPlan(
            name="trainer rank",
            count=trainer.trainer_num_workers,
            detail=f"{trainer.train_backend}, {ray.ray_trainer_cpus_per_worker:g} CPU each",
        ),
        ProcessPlan(
            name="vLLM server",
            count=inference.inference_num_workers,
            detail=f"{host}, {ports}{for_older}{for_evals}{parts}, "
            f"{ray.ray_inference_cpus_per_worker:g} CPU each{shared}{bits}",
        ),
    )


def _eval_plan(config: TrainConfig, entry: EvalEntry) -> EvalPlan:
    times = [
        "before" if config.evals.eval_before_training else "",
        f"every {entry.eval_every} steps" if entry.eval_every else "",
        "after" if config.evals.eval_after_training else "",
    ]
    return EvalPlan(
        name=entry.name,
        when=", ".join(time for time in times if time),
        num_rollouts=(entry.num_samples or EVAL_SAMPLES) * entry.rollouts,
    )


def _outputs(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    every = config.checkpoint.checkpoint_every
    checkpoints = f"every {every} steps and at the end" if every else "at the end"
    where = config.checkpoint.checkpoint_dir
    place = "" if where is None else f", in {checkpoints_folder(config).absolute()}"
    evals = [("evals", "results of each evaluation")] if config.evals.evals else []
    return (
        ("config.json", "every setting, defaults included"),
        ("run.json", "identity, versions, state"),
        ("metrics.jsonl", "one line per step"),
        ("rollouts", "one parquet file per step, every rollout"),
        *evals,
        ("logs", "output of every process"),
        ("checkpoints", f"state of the run, {checkpoints}{place}"),
        ("summary.json", "rewards and evals, first and last"),
        ("report.html", "the run as one page"),
    )


def how_activations_are_kept(prepared: Prepared) -> str:
    """Return what `gradient_checkpointing` means for this run on this machine.

    With "auto" the ranks decide by measurements; this is an estimate.
    """
    config = prepared.config
    if config.trainer.train_backend == "megatron":
        return _WORDS[config.megatron.megatron_gradient_checkpointing]
    kind = config.trainer.gradient_checkpointing
    layer = layer_bytes(config, prepared.facts, BYTES_PER_VALUE[prepared.dtype])
    room, reason = _room(prepared)
    if kind != "auto":
        return _WORDS[kind] + _faster(prepared, layer, room)
    begin = "as few layers are recomputed as memory needs"
    if room is None or layer is None:
        return f"{begin}; {reason}"
    return f"{begin}: {_estimate(prepared.facts, layer, room, config)}; {reason}"


def _faster(prepared: Prepared, layer: LayerBytes | None, room: float | None) -> str:
    """Return the advice to recompute less, if the memory of a GPU allows that; else ""."""
    trainer, num_layers = prepared.config.trainer, prepared.facts.num_layers or 0
    is_full = trainer.gradient_checkpointing in (True, "full")
    if not is_full or trainer.compile or room is None or layer is None:
        return ""
    if (count := fewest_recomputed(num_layers, layer, room)) >= num_layers - 1:
        return ""
    return (
        f"; by an estimate of memory only about {count} of {num_layers} layers have to be: "
        "gradient_checkpointing = 'auto' would be faster"
    )


def _estimate(facts: ModelFacts, layer: LayerBytes, room: float, config: TrainConfig) -> str:
    num_layers = facts.num_layers or 0
    count = fewest_recomputed(num_layers, layer, room)
    kept = kept_bytes(num_layers, layer, count)
    return (
        f"about {count} of {num_layers} for a row of {config.trainer.seq_len} tokens, which keeps "
        f"{kept / GIB:.2f} GiB then and may keep {max(0.0, room) / GIB:.2f}"
    )


def _room(prepared: Prepared) -> tuple[float | None, str]:
    """Return the bytes that a rank may keep, if they are known, and how they were found."""
    given = prepared.config.trainer.activation_memory_gib
    if given is not None:
        return given * GIB, "activation_memory_gib"
    if prepared.device == "cpu":
        return None, "ranks use half of the memory that is free when they start"
    rank = rank_memory(prepared.config, prepared.facts, device=prepared.device)
    if rank is None or not all(prepared.gpus) or not prepared.gpus:
        return None, "ranks measure what weights, gradients and moments leave of their GPU"
    others = sum(size for name, size in rank.parts if name != ACTIVATIONS)
    inference, gpu = prepared.config.inference, min(prepared.gpus)
    of_server = inference.gpu_memory_utilization if inference.colocate == "resident" else 0.0
    left = (_GPU_SHARE - of_server) * gpu - CONTEXT_BYTES - others
    return left, "what weights, gradients and moments leave of a GPU"
