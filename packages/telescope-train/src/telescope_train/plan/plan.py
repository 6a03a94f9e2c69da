"""What `telescope train` would do, worked out from the settings alone: the dry run.

Looks at the model folder, the installed environments, the run folder and the ports, and
starts nothing. `plan_text` turns a plan into text. Imports no torch, transformers or ray.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from telescope_core.environment_record import EnvironmentRecord
from telescope_core.errors import TelescopeError
from telescope_train.algorithms.corrections import age_of_rollouts
from telescope_train.chat.template import how_replies_are_read, template_problems
from telescope_train.checkpoints.folders import checkpoints_folder
from telescope_train.checkpoints.resume import location_problems
from telescope_train.cluster.ports import port_problems
from telescope_train.config.run_folder import run_folder
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.models.device import machine_device
from telescope_train.models.facts import (
    UNKNOWN_FACTS,
    ModelFacts,
    context_problem,
    read_model_facts,
)
from telescope_train.plan.checks.config import max_tokens_problems
from telescope_train.plan.memory import MemoryPlan, memory_of
from telescope_train.rollouts.accept import load_accept_fn
from telescope_train.rollouts.environments import (
    environment_problems,
    environment_records,
    worker_plans,
)
from telescope_train.rollouts.held_out import held_out_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A kind of process that is started."""

    name: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentShare:
    """What one environment contributes to a step, on average."""

    name: str
    version: str
    share: float
    """Of the prompts, 0 to 1."""
    groups: float
    group_size: int

    @property
    def rollouts(self) -> float:
        """Rollouts per step."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """One evaluation and when it runs."""

    name: str
    when: str
    num_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a dry run shows."""

    run_folder: str
    model: str
    num_parameters: int | None
    num_steps: int
    algorithm: str
    age_of_rollouts: str
    """How much older than the weights they train, and what corrects for it."""
    replies: str
    """How what the model writes is read."""
    max_model_len: int
    groups_per_step: int
    rollouts_per_step: float
    max_tokens_per_step: int
    processes: tuple[ProcessPlan, ...]
    environments: tuple[EnvironmentShare, ...]
    codes: Mapping[str, EnvironmentRecord]
    """Name in the settings -> which code it is; those that are not here are left out."""
    memory: tuple[MemoryPlan, ...]
    evals: tuple[EvalPlan, ...]
    outputs: tuple[tuple[str, str], ...]
    """Name in the run folder, and what is written there."""
    problems: tuple[str, ...]
    """Why the run cannot start on this machine; empty when it can."""


def make_plan(config: TrainConfig) -> Plan:
    """Return the plan of `config`; what stands in the way is in `problems`, nothing is raised."""
    problems: list[str] = []
    facts = UNKNOWN_FACTS
    try:
        facts = read_model_facts(config.model.model, output_dir=config.run.output_dir)
    except TelescopeError as error:
        problems.append(str(error))
    limit = max_model_len(config, facts)
    if facts.max_positions is not None:
        problems += _length_problems(config, facts.max_positions, limit)
    problems += _step_problems(config, facts)
    problems += template_problems(config.model)
    codes = environment_records(config)
    shares = _environment_shares(config, codes)
    problems += environment_problems(config)
    problems += held_out_problems(config)
    problems += location_problems(config)
    if config.ray.ray_address is None:
        problems += port_problems(config)
        problems += _device_problems(config)
    rollouts = sum(share.rollouts for share in shares)
    return Plan(
        run_folder=str(run_folder(config)),
        model=config.model.model,
        num_parameters=facts.num_parameters,
        num_steps=config.run.number_of_steps,
        algorithm=config.algorithm.algorithm,
        age_of_rollouts=age_of_rollouts(config),
        replies=how_replies_are_read(config.model),
        max_model_len=limit,
        groups_per_step=config.rollout.prompts_batch_size_for_trainer,
        rollouts_per_step=rollouts,
        max_tokens_per_step=round(rollouts * limit),
        processes=_processes(config),
        environments=tuple(shares),
        codes=codes,
        memory=memory_of(config, facts, limit, device=machine_device()),
        evals=tuple(_eval_plan(config, entry) for entry in config.evals.evals),
        outputs=_outputs(config),
        problems=tuple(dict.fromkeys(problems)),
    )


def max_model_len(config: TrainConfig, facts: ModelFacts) -> int:
    """Return the tokens of prompt and answer together that servers and trainer allow."""
    given = config.inference.max_model_len
    own = facts.max_positions or config.trainer.seq_len
    return given if given is not None else min(config.trainer.seq_len, own)


def _length_problems(config: TrainConfig, positions: int, limit: int) -> Iterator[str]:
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
    if facts.num_heads is not None and facts.num_kv_heads is not None:
        problem = context_problem(
            config.trainer.fsdp_context_parallel_size,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
        )
        if problem is not None:
            yield f"trainer.{problem}"
    section = config.algorithm
    threshold, vocab_size = section.gibberish_token_threshold, facts.vocab_size
    if section.filter_gibberish and vocab_size is not None and threshold >= vocab_size - 1:
        yield (
            f"algorithm.filter_gibberish has no effect: no token id of the model's {vocab_size} is "
            f"above gibberish_token_threshold ({threshold}); lower it, or turn the filter off"
        )


def _device_problems(config: TrainConfig) -> Iterator[str]:
    if machine_device() == "cuda":
        return
    if config.trainer.optimizer == "adamw_8bit":
        yield (
            "trainer.optimizer = 'adamw_8bit' compiles its step for a GPU, and this machine has "
            "none; use 'adamw' or 'adamw_bf16'"
        )
    if config.trainer.optimizer_cpu_offload:
        yield (
            "trainer.optimizer_cpu_offload has no effect without a GPU: everything is in CPU "
            "memory already; remove it"
        )


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


def _processes(config: TrainConfig) -> tuple[ProcessPlan, ...]:
    inference, trainer, ray = config.inference, config.trainer, config.ray
    first = inference.inference_base_port
    last = first + inference.inference_num_workers - 1
    ports = f"port {first}" if first == last else f"ports {first} to {last}"
    address = ray.ray_address
    return (
        ProcessPlan(name="driver", count=1, detail="this process: the loop and the gateway"),
        *(
            ProcessPlan(name="environment", count=worker.count, detail=worker.detail)
            for worker in worker_plans(config)
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
            detail=f"{inference.inference_host}, {ports}, "
            f"{ray.ray_inference_cpus_per_worker:g} CPU each",
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
        num_rollouts=entry.num_samples * entry.rollouts,
    )


def _outputs(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    every = config.checkpoint.checkpoint_every
    checkpoints = f"every {every} steps and at the end" if every else "at the end"
    where = config.checkpoint.checkpoint_dir
    place = "" if where is None else f", in {checkpoints_folder(config)}"
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
