"""Render a plan as text for a terminal, at most 80 columns wide."""

from collections.abc import Iterator

from telescope_core.base.number_text import counted
from telescope_core.base.secret_names import secrets_text
from telescope_core.base.terminal import row, wrapped
from telescope_train.plan.memory import ACTIVATIONS, MemoryPlan
from telescope_train.plan.plan import Plan


def render_plan(plan: Plan) -> str:
    """Return the text that `telescope train --dry-run` prints."""
    lines = [
        *_head(plan),
        "",
        "environments",
        *_codes(plan),
        "",
        "processes",
        *(row(f"{part.count} x {part.name}", part.detail) for part in plan.processes),
        "",
        "one step",
        *_batch(plan),
        "",
        "memory, each",
        *_memory(plan),
        "",
    ]
    if plan.evals:
        rows = (
            row(part.name, f"{counted(part.num_rollouts, 'rollout')}: {part.when}")
            for part in plan.evals
        )
        lines += ["evaluations", *rows, ""]
    lines += wrapped(f"written to {plan.run_folder}", "")
    lines += [*(row(name, what) for name, what in plan.outputs), ""]
    if plan.notes:
        lines += ["to know", *(line for note in plan.notes for line in wrapped(note, "- ")), ""]
    lines += _verdict(plan)
    return "\n".join(line.rstrip() for line in lines)


def _head(plan: Plan) -> Iterator[str]:
    steps = counted(plan.num_steps, "step")
    size = _model_size(plan.num_parameters)
    yield from wrapped(f"{steps} of {plan.algorithm} on {plan.model} ({size})", "")
    if plan.reference is not None:
        size = _model_size(plan.num_reference_parameters)
        yield from wrapped(f"with the reference {plan.reference} ({size})", "")
    for line in plan.begins:
        yield from wrapped(line.strip(), "  " if line.startswith(" ") else "")


def _model_size(num_parameters: int | None) -> str:
    if num_parameters is None:
        return "size unknown before download"
    return f"{_count(num_parameters)} parameters"


def _codes(plan: Plan) -> Iterator[str]:
    for name, code in plan.codes.items():
        yield row(name, code.about)
        if secrets := plan.secrets.get(name):
            yield row("", f"secrets: {secrets_text(secrets)}")
    if not plan.codes:
        yield "  none of them is on this machine"


def _batch(plan: Plan) -> Iterator[str]:
    for share in plan.environments:
        yield row(
            share.name,
            f"{share.share:.0%} of the prompts: {'' if share.share == 1 else 'on average '}"
            f"{share.groups:g} groups x {share.group_size} = "
            f"{share.rollouts:g} rollouts{_version(share.version)}",
        )
    yield row(
        "together",
        f"{plan.groups_per_step} groups, {plan.rollouts_per_step:g} rollouts, at most "
        f"{plan.max_tokens_per_step:,} tokens ({plan.max_model_len:,} each)",
    )
    yield row("age of rollouts", plan.age_of_rollouts)
    yield row("gradients", plan.gradients)
    yield row("prompts", plan.prompts)
    yield row("activations", plan.activations)
    yield row("replies", f"read: {plan.replies}")
    if plan.lora is not None:
        yield row("LoRA", plan.lora)


def _version(version: str) -> str:
    return "" if version == "0" else f" ({version})"


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.memory:
        yield "  unknown: the model's config.json is not on this machine, or of another kind"
    for part in plan.memory:
        yield row(part.process, _memory_text(part))
    if plan.memory:
        estimated = any(what == ACTIVATIONS for part in plan.memory for what, _ in part.parts)
        yield (
            "  Activations are an estimate; libraries and environments are not counted."
            if estimated
            else "  Not counted: activations, the libraries themselves, environments."
        )


def _memory_text(part: MemoryPlan) -> str:
    inner = " + ".join(f"{_size(size)} {what}" for what, size in part.parts)
    return f"{_size(part.total_bytes)} = {inner}"


def _verdict(plan: Plan) -> Iterator[str]:
    if not plan.problems and plan.ray_address is not None:
        yield from wrapped(
            "Nothing was started. The settings are in order; the cluster at "
            f"{plan.ray_address} was not asked, and neither the number of its GPUs nor their "
            "memory was checked.",
            "",
        )
        return
    if not plan.problems:
        yield "Nothing was started. The run can start on this machine."
        return
    yield "Nothing was started. The run cannot start:"
    for problem in plan.problems:
        yield from wrapped(problem, "- ")


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{_rounded(number / size)}{unit}"
    return str(number)


def _size(num_bytes: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{_rounded(num_bytes / size)} {unit}"
    return f"{num_bytes} B"


def _rounded(number: float) -> str:
    """Return three digits, and from 1000 on, where these would have an exponent, all."""
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
