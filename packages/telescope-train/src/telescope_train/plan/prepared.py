"""Facts read from this machine before a run: once, for the dry run and for the run itself.

This is the device and dtype, the model's sizes, the environments, and where a run continues.
Everything else gets it from `Prepared`, so nothing is read a second time or can change in between.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_train.chat.template import template_problems
from telescope_train.checkpoints.resume import (
    ResumePoint,
    inputs_of,
    location_problems,
    resume_point,
)
from telescope_train.cluster.ports import port_problems
from telescope_train.config.fields import sorted_out, unused
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import CPU_HEAD_SIZES
from telescope_train.inference.wire import secret_problems
from telescope_train.models.device import (
    Device,
    compute_dtype,
    machine_device,
    machine_gpus,
    shared_memory_bytes,
)
from telescope_train.models.facts import (
    UNKNOWN_FACTS,
    ModelFacts,
    context_problem,
    read_model_facts,
    tensor_problem,
)
from telescope_train.observability.trackers.logins import login_problem
from telescope_train.observability.trackers.tracker import names_in_use
from telescope_train.plan.checks.cluster import colocation_problems, weights_device_problems
from telescope_train.plan.checks.config import max_tokens_problems
from telescope_train.plan.checks.megatron import (
    megatron_device_problems,
    megatron_model_problems,
)
from telescope_train.plan.checks.model import (
    ModelLook,
    look_at_model,
    look_at_reference,
    look_at_template,
)
from telescope_train.plan.checks.trainer import (
    lora_targets,
    routing_device_problems,
    routing_model_problems,
    shared_rows_problem,
)
from telescope_train.plan.gpus import colocated, gpu_problems, shared_memory_note
from telescope_train.rollouts.accept import load_accept_fn
from telescope_train.rollouts.environments import RunEnvironments, prepare_environments
from telescope_train.rollouts.held_out import held_out_problems
from telescope_train.step.stream_rules import stream_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All facts about a run before anything is started."""

    config: TrainConfig
    device: Device
    """Device of ranks and servers."""
    facts: ModelFacts
    max_model_len: int
    """Tokens of prompt and answer together that servers and trainer allow."""
    environments: RunEnvironments
    inputs: Mapping[str, str]
    """Digests of the input files besides its environments, before it starts."""
    resume: ResumePoint | None
    """The checkpoint to continue from; None = start from the beginning."""
    gpus: tuple[int, ...]
    """Bytes of each GPU of this machine, 0 where unknown; empty on CPU and on a cluster's nodes."""
    problems: tuple[str, ...]
    """Reasons why the run cannot start on this machine; empty if it can."""
    redundant: tuple[str, ...] = ()
    """Settings that were given without effect on this device, each with its value."""
    notes: tuple[str, ...] = ()
    """Remarks on the files of the model, and on this machine."""

    @property
    def dtype(self) -> str:
        """Name of the dtype that layers compute in."""
        return compute_dtype(self.config.model.mixed_precision_dtype, self.device)

    def on_cluster(self, *, has_gpus: bool) -> "Prepared":
        """Return this with the device of a cluster, which may differ from this machine's.

        Raises ConfigError if the settings do not fit the device.
        """
        device: Device = "cuda" if has_gpus else "cpu"
        on_device = sorted_out(_device_problems(self.config, self.facts, device))
        found = replace(
            self, device=device, problems=on_device.problems, redundant=on_device.redundant
        )
        found.require_sound()
        return found

    def require_sound(self) -> None:
        """Raise ConfigError with one line for each problem."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def prepare(config: TrainConfig) -> Prepared:
    """Examine this machine; obstacles are in `problems`, and nothing is raised or written."""
    problems: list[str] = []
    device, facts, resume = machine_device(), UNKNOWN_FACTS, None
    look = ModelLook()
    try:
        facts = read_model_facts(config.model.model, output_dir=config.run.output_dir)
        look = look_at_model(
            config.model,
            dtype=config.model.model_dtype,
            lora_targets=lora_targets(config.trainer),
        )
        problems += look.problems
    except TelescopeError as error:
        problems.append(str(error))
    limit = _max_model_len(config, facts)
    reference, other = _look_at_reference(config)
    facts = replace(facts, reference=reference)
    problems += [*other.problems, *_reference_problems(config, facts, limit)]
    look = look._replace(notes=(*look.notes, *other.notes))
    gpus = tuple(machine_gpus()) if device == "cuda" and config.ray.ray_address is None else ()
    asked, config = config.inference.colocate, colocated(config, facts, limit, gpus)
    if config.inference.colocate != asked:
        problems += colocation_problems(config)
        problems += [found for found in [stream_problem(config)] if found is not None]
    problems += _length_problems(config, facts, limit)
    problems += _step_problems(config, facts)
    problems += megatron_model_problems(config.trainer, config.megatron, facts)
    problems += routing_model_problems(config, facts)
    told = list(template_problems(config.model))
    problems += told
    if not told and not problems:
        # Of a model that is here and whole: what is missing would be told a second time.
        template = look_at_template(config)
        problems += template.problems
        look = look._replace(notes=(*look.notes, *template.notes))
    environments = prepare_environments(config)
    problems += environments.problems
    problems += held_out_problems(config, environments.records)
    for name in names_in_use(config.observability):
        if problem := login_problem(name):
            problems.append(f"observability: {problem}")
    inputs = inputs_of(
        config.model.model,
        chat_template=config.model.chat_template,
        accept_fn=config.rollout.should_accept_fn,
        reference_model=config.algorithm.reference_model,
    )
    try:
        resume = resume_point(config, environments.records, inputs)
        problems += location_problems(config, resume)
    except TelescopeError as error:
        problems.append(str(error))
    problems += secret_problems(os.environ)
    if config.ray.ray_address is None:
        if device == "cuda":
            problems += gpu_problems(config, facts, limit, gpus)
            if note := shared_memory_note(config, shared_memory_bytes()):
                look = look._replace(notes=(*look.notes, note))
        problems += port_problems(config)
        problems += _device_problems(config, facts, device)
    found = sorted_out(problems)
    return Prepared(
        config=config,
        device=device,
        facts=facts,
        max_model_len=limit,
        environments=environments,
        inputs=inputs,
        resume=resume,
        gpus=gpus,
        problems=found.problems,
        redundant=found.redundant,
        notes=look.notes,
    )


def _look_at_reference(config: TrainConfig) -> tuple[ModelFacts | None, ModelLook]:
    """Return the facts of `reference_model`, if there is one, and what was found in its files."""
    other = config.algorithm.reference_model
    if other is None:
        return None, ModelLook()
    try:
        facts = read_model_facts(other, output_dir=config.run.output_dir)
        return facts, look_at_reference(config, other)
    except TelescopeError as error:
        return UNKNOWN_FACTS, ModelLook(problems=(f"algorithm.reference_model: {error}",))


def _max_model_len(config: TrainConfig, facts: ModelFacts) -> int:
    """Return the tokens of prompt and answer together that servers and trainer allow."""
    given = config.inference.max_model_len
    own = facts.max_positions or config.trainer.seq_len
    return given if given is not None else min(config.trainer.seq_len, own)


def _reference_problems(config: TrainConfig, facts: ModelFacts, limit: int) -> Iterator[str]:
    where, reference = "algorithm.reference_model", facts.reference
    if reference is None:
        return
    for problem in megatron_model_problems(config.trainer, config.megatron, reference):
        yield f"{where}: {problem}"
    if reference.max_positions is not None and limit > reference.max_positions:
        yield (
            f"{where} was made for {reference.max_positions} positions, and samples may have "
            f"{limit}; lower trainer.seq_len and inference.max_model_len, or use another one"
        )
    rows, own = reference.vocab_size, facts.vocab_size
    if rows is not None and own is not None and rows < own:
        yield (
            f"{where} has {rows:,} rows for tokens and the model {own:,}, so that it has no "
            "probability for some of what the model may sample; use a reference with as many"
        )
    if problem := _context_problem(config, reference):
        yield f"{where}: {problem}"


def _context_problem(config: TrainConfig, facts: ModelFacts) -> str | None:
    if facts.num_heads is None or facts.num_kv_heads is None:
        return None
    size, heads = config.trainer.fsdp_context_parallel_size, facts.num_heads
    return context_problem(size, num_heads=heads, num_kv_heads=facts.num_kv_heads)


def _length_problems(config: TrainConfig, facts: ModelFacts, limit: int) -> Iterator[str]:
    positions = facts.max_positions
    if positions is None:
        return
    if limit > positions:
        yield (
            f"inference.max_model_len ({limit}) exceeds the {positions} positions of the model; "
            "lower it"
        )
    elif limit < config.trainer.seq_len and config.inference.max_model_len is None:
        yield from max_tokens_problems(config, limit, "the length the model was made for")


def _step_problems(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    accept = config.rollout.should_accept_fn
    if accept is not None:
        try:
            load_accept_fn(accept)
        except TelescopeError as error:
            yield str(error)
    if problem := _context_problem(config, facts):
        yield f"trainer.{problem}"
    size = config.inference.inference_tensor_parallel_size
    if problem := tensor_problem("inference.inference_tensor_parallel_size", size, facts):
        yield problem
    section = config.algorithm
    threshold, vocab_size = section.gibberish_token_threshold, facts.vocab_size
    if section.filter_gibberish and vocab_size is not None and threshold >= vocab_size - 1:
        yield (
            f"algorithm.filter_gibberish has no effect: no token id of the model's {vocab_size} is "
            f"above gibberish_token_threshold ({threshold}); lower it, or turn the filter off"
        )


def _device_problems(config: TrainConfig, facts: ModelFacts, device: Device) -> Iterator[str]:
    yield from megatron_device_problems(config, device)
    yield from weights_device_problems(config, device)
    yield from routing_device_problems(config, device)
    if problem := shared_rows_problem(config.trainer.fsdp_context_parallel_size, facts, device):
        yield f"trainer.{problem}"
    if device == "cuda":
        return
    if facts.head_dim is not None and facts.head_dim not in CPU_HEAD_SIZES:
        yield (
            f"model: vLLM on a CPU computes attention with heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} values, and this model's have "
            f"{facts.head_dim}; use another model, or a GPU"
        )
    if config.trainer.optimizer == "adamw_8bit":
        yield (
            "trainer.optimizer = 'adamw_8bit' compiles its step for a GPU, and this machine has "
            "none; use 'adamw' or 'adamw_bf16'"
        )
    for name in ("optimizer_cpu_offload", "fsdp_cpu_offload"):
        if getattr(config.trainer, name):
            yield (
                f"trainer.{name} has no effect without a GPU: everything is in CPU memory "
                "already; remove it"
            )
    yield from unused(
        config.inference,
        "inference.gpu_memory_utilization",
        "without a GPU: on CPU, vLLM reserves VLLM_CPU_KVCACHE_SPACE GiB, an environment "
        "variable; remove the setting",
    )
