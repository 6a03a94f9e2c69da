"""How many examples each eval of a run plays, compared with how many its environment has."""

import asyncio
from collections.abc import Mapping, Sequence

from telescope_core.base.errors import ConfigError
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import EnvironmentDescription
from telescope_train.config.schema import EVAL_SAMPLES, EvalEntry
from telescope_train.rollouts.held_out import eval_split


async def check_num_examples(
    entries: Sequence[EvalEntry], environments: Mapping[str, EnvironmentClient]
) -> list[str]:
    """Return a note for each eval that plays fewer examples than it would by default.

    Raises ConfigError, with a line for each, if evals ask for examples that are not there.
    `environments` are those of the evals, by the names of entries.
    """
    described = await asyncio.gather(*(environments[one.name].describe() for one in entries))
    problems: list[str] = []
    notes: list[str] = []
    for index, (entry, description) in enumerate(zip(entries, described, strict=True)):
        where = f"evals[{index}] ({entry.name})"
        if (problem := _problem(entry, description)) is not None:
            problems.append(f"{where}: {problem}")
            continue
        size = description.num_examples[eval_split(entry, description)]
        if entry.num_samples is None and size is not None and size < EVAL_SAMPLES:
            notes.append(f"{where}: plays all {size} examples of its split, as there are no more")
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def _problem(entry: EvalEntry, description: EnvironmentDescription) -> str | None:
    """Return why an eval cannot be played; None if it can."""
    sizes, split = description.num_examples, eval_split(entry, description)
    if split not in sizes:
        return (
            f"the environment has no {split} split, only {', '.join(sizes) or 'none'}; remove the "
            "eval, or set separate_eval_samples to evaluate on the first training examples"
        )
    size, wanted = sizes[split], entry.num_samples
    if size == 0:
        return (
            f"the environment has no examples in its {split} split; see what examples() or its "
            "data gives there, or remove the eval"
        )
    if size is not None and wanted is not None and wanted > size:
        return (
            f"num_samples is {wanted}, but the environment has {size} examples in its {split} "
            f"split; set it to at most {size}, or remove it to play {min(size, EVAL_SAMPLES)}"
        )
    return None
