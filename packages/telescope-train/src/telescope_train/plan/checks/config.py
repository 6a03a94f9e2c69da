"""Check which settings fit together. Pure; every message says what to change.

A setting that would have no effect is refused if the user gave it, so that no setting is accepted
and then ignored.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.processes.settings import split_address
from telescope_train.chat.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from telescope_train.chat.formats.choose import AUTO
from telescope_train.config.eval_folders import eval_folder_name
from telescope_train.config.fields import Found, sorted_out, unused
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig
from telescope_train.observability.trackers.tracker import missing_trackers
from telescope_train.plan.checks.algorithm import algorithm_problems
from telescope_train.plan.checks.cluster import (
    cluster_problems,
    colocation_problems,
    weights_problems,
)
from telescope_train.plan.checks.megatron import megatron_problems
from telescope_train.plan.checks.step import step_problems
from telescope_train.plan.checks.trainer import (
    checkpoint_problems,
    routing_problems,
    trainer_problems,
)
from telescope_train.rollouts.environments import starts_processes

_PARSERS = {"tool_call_parser": TOOL_CALL_PARSERS, "reasoning_parser": REASONING_PARSERS}


_NEEDS = {
    "prometheus_host": "prometheus_port",
    "wandb_project": "use_wandb",
    "wandb_tags": "use_wandb",
    "wandb_upload_logs": "use_wandb",
    "wandb_upload_logs_detailed": "use_wandb",
    "wandb_upload_logs_stdout": "use_wandb",
}
"""Setting -> the setting without which it has no effect."""


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError with one line for each problem."""
    found = config_found(config)
    if found.problems:
        raise ConfigError("\n".join(found.problems))


def config_found(config: TrainConfig) -> Found:
    """Return problems of settings on any machine, and settings without effect."""
    checks = [
        *_environment_problems(config),
        *process_problems(config),
        *_length_problems(config),
        *algorithm_problems(config),
        *trainer_problems(config),
        *megatron_problems(config),
        *checkpoint_problems(config.checkpoint, config.run.number_of_steps),
        *step_problems(config),
        *_eval_problems(config),
        *_opponent_problems(config),
        *_gateway_problems(config),
        *cluster_problems(config),
        *observability_problems(config),
        *weights_problems(config),
        *colocation_problems(config),
        *routing_problems(config),
        *_name_problems(config),
    ]
    return sorted_out(checks)


def _environment_problems(config: TrainConfig) -> Iterator[str]:
    names = Counter(entry.name for entry in config.environments)
    for name in sorted(name for name, count in names.items() if count > 1):
        yield (
            f"environments: {name!r} is listed {names[name]} times; "
            "keep one entry and set its weight to the sum of the weights"
        )
    if config.rollout.temperature == 0:
        yield _temperature_problem("rollout.temperature")
    for index, entry in enumerate(config.environments):
        where = f"environments[{index}] ({entry.name})"
        if entry.weight <= 0:
            yield (
                f"{where}: weight must be above 0, got {entry.weight:g}; "
                "raise it, or remove the environment"
            )
        if entry.temperature == 0:
            yield _temperature_problem(f"{where}: temperature")
        yield from _reward_range_problems(entry, where)


def _temperature_problem(where: str) -> str:
    return (
        f"{where} must be above 0 in training, got 0: greedy rollouts of one prompt are all the "
        "same, so nothing can be learned from them; use 1.0 (evals may use 0)"
    )


def _reward_range_problems(entry: EnvironmentEntry, where: str) -> Iterator[str]:
    if (entry.reward_min is None) != (entry.reward_max is None):
        given, missing = ("reward_min", "reward_max")[:: 1 if entry.reward_max is None else -1]
        yield f"{where}: {given} needs {missing} as well; set both, or neither"
        return
    low, high = entry.reward_min or 0.0, entry.reward_max or 0.0
    if entry.reward_min is not None and low >= high:
        yield f"{where}: reward_min must be below reward_max, got {low:g} and {high:g}"


def _length_problems(config: TrainConfig) -> Iterator[str]:
    seq_len, limit = config.trainer.seq_len, config.inference.max_model_len
    if limit is not None and limit > seq_len:
        yield (
            f"inference.max_model_len ({limit}) must not exceed trainer.seq_len ({seq_len}): "
            "a longer rollout could not be trained on; raise seq_len or lower max_model_len"
        )
    limit = min(limit or seq_len, seq_len)
    which = "inference.max_model_len" if limit < seq_len else "trainer.seq_len"
    yield from max_tokens_problems(config, limit, which)


def max_tokens_problems(config: TrainConfig, limit: int, which: str) -> Iterator[str]:
    """Yield each `max_tokens` that leaves no room for a prompt within `limit` tokens."""
    lengths = {"rollout.max_tokens": config.rollout.max_tokens}
    for index, entry in enumerate(config.environments):
        lengths[f"environments[{index}] ({entry.name}): max_tokens"] = entry.max_tokens or 1
    for index, entry in enumerate(config.evals.evals):
        lengths[f"evals[{index}] ({entry.name}): max_tokens"] = entry.max_tokens or 1
    for where, max_tokens in lengths.items():
        if max_tokens >= limit:
            yield (
                f"{where} ({max_tokens}) must be below {which} ({limit}), which includes the "
                f"prompt; lower max_tokens or raise {which.rpartition('.')[2]}"
            )


def _eval_problems(config: TrainConfig) -> Iterator[str]:
    section = config.evals
    names = Counter(entry.name for entry in section.evals)
    for name in sorted(name for name, count in names.items() if count > 1):
        yield f"evals: {name!r} is listed {names[name]} times; keep one"
    by_folder: dict[str, str] = {}
    for name in names:
        other = by_folder.setdefault(eval_folder_name(name, ""), name)
        if other != name:
            yield (
                f"evals: {other!r} and {name!r} would be recorded in the same folder, because "
                "'/' and ':' are written as '-'; rename one of them"
            )
    around = section.eval_before_training or section.eval_after_training
    if around and not section.evals:
        yield (
            "evals: eval_before_training and eval_after_training need at least one [[evals]] "
            "entry; add one, or turn them off"
        )
    yield from _eval_server_problems(config)
    for index, entry in enumerate(section.evals):
        where = f"evals[{index}] ({entry.name})"
        for field, holds in (("top_p", None), ("top_k", (1,)), ("min_p", None)):
            if not entry.temperature:
                why = (
                    "with temperature 0, which always takes the likeliest token; remove "
                    f"{field}, or raise the temperature"
                )
                yield from unused(entry, f"{where}: {field}", why, holds=holds)
        if max(entry.pass_k) > entry.rollouts:
            yield (
                f"{where}: pass_k {max(entry.pass_k)} needs at least that many rollouts per "
                f"example, got rollouts = {entry.rollouts}; raise rollouts or lower pass_k"
            )
        if not around and not entry.eval_every:
            yield (
                f"{where}: would never run; set eval_every, eval_before_training or "
                "eval_after_training, or remove the evaluation"
            )


def _eval_server_problems(config: TrainConfig) -> Iterator[str]:
    section, total = config.evals, config.inference.inference_num_workers
    number = section.eval_num_servers
    if number >= total:
        yield (
            f"evals.eval_num_servers ({number}) must be below inference.inference_num_workers "
            f"({total}), which it is a part of: no server would be left for rollouts; raise "
            "inference_num_workers, or use 0 to share the servers"
        )
    if number and not section.evals:
        yield (
            "evals.eval_num_servers has no effect without [[evals]]: its servers would never be "
            "asked; add an evaluation, or remove it"
        )
    elif number and not any(entry.eval_every for entry in section.evals):
        yield (
            "evals.eval_num_servers has no effect without eval_every: no evaluation runs while "
            "rollouts are sampled; set eval_every, or remove eval_num_servers"
        )


def _opponent_problems(config: TrainConfig) -> Iterator[str]:
    section, of_evals = config.inference, config.evals.eval_num_servers
    number, total = section.opponent_num_servers, section.inference_num_workers
    if number and number + of_evals >= total:
        yield (
            f"inference.opponent_num_servers ({number}) and evals.eval_num_servers ({of_evals}) "
            f"are parts of inference.inference_num_workers ({total}): no server would be left for "
            "rollouts; raise inference_num_workers"
        )
    if not number:
        why = (
            "without opponent_num_servers: no server holds an older version; set that, or remove it"
        )
        yield from unused(section, "inference.opponent_update_every", why)
    entries = {
        **{f"environments[{n}]": one for n, one in enumerate(config.environments)},
        **{f"evals[{n}]": one for n, one in enumerate(config.evals.evals)},
    }
    for where, entry in entries.items():
        opponents = entry.env.get("opponents")
        for seat, one in opponents.items() if isinstance(opponents, Mapping) else ():
            if isinstance(one, Mapping) and one.get("older_version") and not number:
                yield (
                    f"{where} ({entry.name}): opponents.{seat} is an older version of the policy, "
                    "and no server holds one; set inference.opponent_num_servers, and "
                    "inference_num_workers to as many servers more"
                )


def _gateway_problems(config: TrainConfig) -> Iterator[str]:
    section = config.inference
    if section.gateway_host in ("0.0.0.0", "::", "*"):
        yield (
            f"inference.gateway_host is {section.gateway_host!r}, which no program can connect to; "
            "give the address of this machine at which environments reach it"
        )
    first = section.inference_base_port
    last = first + section.inference_num_workers - 1
    if section.gateway_port and first <= section.gateway_port <= last:
        yield (
            f"inference.gateway_port ({section.gateway_port}) is a port of the inference servers "
            f"({first} to {last}); use another port, or 0 for any free one"
        )


def _name_problems(config: TrainConfig) -> Iterator[str]:
    backends = entry_points(group="telescope.backends").names
    if config.trainer.train_backend not in backends:
        yield str(unknown_name("train_backend", config.trainer.train_backend, backends))
    for setting, parsers in _PARSERS.items():
        name = getattr(config.model, setting)
        if name != AUTO and name not in parsers:
            yield str(unknown_name(f"model.{setting}", name, (AUTO, *parsers)))


def process_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem with the places of environment processes."""
    section = config.rollout
    started = [
        entry
        for entry in (*config.environments, *config.evals.evals)
        if starts_processes(entry, section.env_isolation)
    ]
    if not started:
        for field in ("env_workers", "env_memory_limit_mb"):
            why = (
                "because no environment of this run starts a process here; set env_isolation = "
                f"'process', or remove {field}"
            )
            yield from unused(section, f"rollout.{field}", why)
    for kind, entries in (("environments", config.environments), ("evals", config.evals.evals)):
        for index, entry in enumerate(entries):
            yield from _entry_problems(entry, f"{kind}[{index}] ({entry.name})", config)


def _entry_problems(
    entry: EnvironmentEntry | EvalEntry, where: str, config: TrainConfig
) -> Iterator[str]:
    isolation = config.rollout.env_isolation
    for address in entry.env_addresses:
        try:
            split_address(address)
        except ConfigError as error:
            yield f"{where}: {error}"
    if entry.env_addresses and isolation == "none":
        yield (
            f"{where}: env_addresses has no effect with env_isolation = 'none'; remove one of them"
        )
    if isinstance(entry, EnvironmentEntry) and not starts_processes(entry, isolation):
        yield from unused(
            entry,
            f"{where}: env_workers",
            "because the environment starts no process here; set env_isolation = 'process', or "
            "remove env_workers (and env_addresses, if it has any)",
            holds=(config.rollout.env_workers,),
        )


def observability_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[observability]`, and with traces of servers."""
    section = config.observability
    for name, needed in _NEEDS.items():
        value = getattr(section, needed)
        if value is None or value is False:
            # It is on by default, and off says what is so: nothing is uploaded.
            holds = (True, False) if name == "wandb_upload_logs" else None
            why = f"without {needed}; set {needed}, or remove {name}"
            yield from unused(section, f"observability.{name}", why, holds=holds)
    if not config.inference.enable_vllm_tracing:
        yield from unused(
            config.inference,
            "inference.otlp_receiver_port",
            "without enable_vllm_tracing; set enable_vllm_tracing = true, or remove "
            "otlp_receiver_port",
        )
    yield from (f"observability: {problem}" for problem in missing_trackers(section))
