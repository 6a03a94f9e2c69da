"""Keep the examples of evals out of training: `separate_eval_samples`, by example id.

Examples are compared by id, not by index or by the name of the environment in the settings. So an
example is held out even if both splits come from one source, or if training uses another name.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from telescope_core.environment_record import EnvironmentRecord
from telescope_core.errors import ConfigError
from telescope_core.protocols import EnvironmentClient
from telescope_core.types import EnvironmentDescription, Split
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig

_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The examples of one environment that must not be trained on."""

    ids: frozenset[str] = frozenset()
    indices: frozenset[int] = field(default_factory=frozenset[int])
    """Where they are in the training split. In a finite split these are all of them; in an endless
    one, those at the indices that the evals use."""


def eval_split(entry: EvalEntry, description: EnvironmentDescription) -> Split:
    """Return the split that an eval plays: the training split if there is no other."""
    if entry.separate_eval_samples and Split.EVAL not in description.num_examples:
        return Split.TRAIN
    return Split.EVAL


async def hold_out(
    config: TrainConfig,
    training: Mapping[str, EnvironmentClient],
    evals: Mapping[str, EnvironmentClient],
    descriptions: Mapping[str, EnvironmentDescription],
    records: Mapping[str, EnvironmentRecord],
) -> dict[str, HeldOut]:
    """Return what is held out of each training environment; reads the ids of its examples once."""
    found: dict[str, HeldOut] = {}
    for entry in config.environments:
        ids: set[str] = set()
        for eval_entry in _separated(config):
            if _environment_id(records, eval_entry) == _environment_id(records, entry):
                client = evals[eval_entry.name]
                split = eval_split(eval_entry, await client.describe())
                ids.update(await _ids(client, split, range(eval_entry.num_samples)))
        if ids:
            size = descriptions[entry.name].num_examples.get(Split.TRAIN)
            held = await _found_in(training[entry.name], frozenset(ids), size)
            if size is not None and len(held.indices) == size:
                raise ConfigError(
                    f"evals hold out all {size} examples of {entry.name!r}, and nothing is left to "
                    "train on; lower num_samples, or turn separate_eval_samples off"
                )
            found[entry.name] = held
    return found


def held_out_problems(
    config: TrainConfig, records: Mapping[str, EnvironmentRecord]
) -> Iterator[str]:
    """Yield the evals whose `separate_eval_samples` would have no effect.

    An environment without a record is a problem of its own, reported where environments are opened.
    """
    trained = {_environment_id(records, one) for one in config.environments}
    for entry in _separated(config):
        mine = _environment_id(records, entry)
        if None not in trained and mine is not None and mine not in trained:
            yield (
                f"evals ({entry.name}): separate_eval_samples has no effect, because this "
                "environment is not trained on; remove it"
            )


def _environment_id(
    records: Mapping[str, EnvironmentRecord], entry: EnvironmentEntry | EvalEntry
) -> str | None:
    """Return what is the same for every name of one environment; None where it is not known."""
    record = records.get(entry.name)
    return None if record is None else record.id.partition("@")[0]


def _separated(config: TrainConfig) -> list[EvalEntry]:
    return [entry for entry in config.evals.evals if entry.separate_eval_samples]


async def _found_in(client: EnvironmentClient, ids: frozenset[str], size: int | None) -> HeldOut:
    indices = range(len(ids) if size is None else size)
    here = await _ids(client, Split.TRAIN, indices)
    held = (index for index, name in zip(indices, here, strict=True) if name in ids)
    return HeldOut(ids=ids, indices=frozenset(held))


async def _ids(client: EnvironmentClient, split: Split, indices: Sequence[int]) -> list[str]:
    found: list[str] = []
    for start in range(0, len(indices), _AT_A_TIME):
        part = indices[start : start + _AT_A_TIME]
        examples = await asyncio.gather(*(client.example(split, index) for index in part))
        found += [example.id for example in examples]
    return found
