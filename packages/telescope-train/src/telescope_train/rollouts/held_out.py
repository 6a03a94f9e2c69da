"""Keep the examples of evals out of training: `separate_eval_samples`, by example id.

Examples are compared by id, not by index or by the name of the environment in the settings. So an
example is held out even if both splits come from one source, or if training uses another name.
`TrainingExamples` is the only way to an example that may be played for training.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import EnvironmentDescription, Group, Message, Split
from telescope_core.records.rows import turns_in
from telescope_train.config.schema import EVAL_SAMPLES, EnvironmentEntry, EvalEntry, TrainConfig
from telescope_train.rollouts.draw import Drawn, ExampleDraw
from telescope_train.rollouts.prefetch import Prefetch

_AT_A_TIME = 64


MAX_HELD_OUT_DRAWS = 1000
"""Draws in a row that may be held-out examples before the run stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The examples of one environment that must not be trained on."""

    ids: frozenset[str] = frozenset()
    indices: frozenset[int] = field(default_factory=frozenset[int])
    """Positions of some of them in the split that is trained on: those that evals take from it by
    index. The others are found when they are drawn."""


class Cleared(NamedTuple):
    """A draw that may be trained on."""

    drawn: Drawn
    held_out: frozenset[str]
    """Ids that its environment must not return for it."""

    def require(self, group: Group) -> Group:
        """Return `group`, played from this draw, if none of its examples is held out.

        Raises TelescopeError otherwise: the environment gave another example than it had shown.
        """
        for example_id in {group.example_id, *(one.example_id for one in group.rollouts)}:
            if example_id in self.held_out:
                raise TelescopeError(
                    f"{self.drawn.environment!r} played example {example_id!r}, which evals hold "
                    f"out, as example {self.drawn.example_index} of its {self.drawn.split} split, "
                    "where it had shown another one. Its examples must be the same at every call; "
                    "run `telescope env validate`"
                )
        return group


class TrainingExamples:
    """Chooses the examples for training: draws in order, and replacements for rejected ones."""

    def __init__(
        self,
        draw: ExampleDraw,
        clients: Mapping[str, EnvironmentClient],
        held_out: Mapping[str, HeldOut],
        prefetch: Prefetch | None = None,
    ) -> None:
        """`prefetch`: prepares examples before they are used."""
        self.draw = draw
        self._prefetch = prefetch
        self._clients = clients
        self._held_out = held_out

    def require_free(self, groups: Iterable[Group]) -> None:
        """Raise ConfigError if an example of the untrained `groups` is held out by evals.

        They were sampled before the run was resumed, when evals may have held out others.
        """
        saved = {
            (group.environment, example_id)
            for group in groups
            for example_id in (group.example_id, *(one.example_id for one in group.rollouts))
        }
        if both := _in_both(self._held_out, saved):
            raise ConfigError(
                f"the checkpoint holds {len(both)} examples that were sampled and are not trained "
                f"on yet, such as {both[0][1]!r} of {both[0][0]!r}, and evals hold them out now; "
                "evaluate on the same examples as before, or turn separate_eval_samples off"
            )

    def next(self) -> Drawn:
        """Return the next draw in order; `cleared` replaces a held-out one."""
        return self.draw.next()

    def begins(self, drawn: Drawn) -> None:
        """Record that a rollout of `drawn` begins to be played."""
        if self._prefetch is not None:
            self._prefetch.keep_ahead_of(drawn.number)

    async def close(self) -> None:
        """Stop preparing examples."""
        if self._prefetch is not None:
            await self._prefetch.close()

    async def cleared(self, drawn: Drawn, group_id: str) -> Cleared:
        """Return `drawn`, or its replacement if it is an example of an eval.

        Raises ConfigError if nothing else seems to be there.
        """
        for number in range(MAX_HELD_OUT_DRAWS):
            held = self._held_out.get(drawn.environment, HeldOut()).ids
            if not held:
                return Cleared(drawn, held)
            client = self._clients[drawn.environment]
            example = await client.example(drawn.split, drawn.example_index)
            if example.id not in held:
                return Cleared(drawn, held)
            # Not the next draw in order: many groups get here at once, and which one comes first
            # must not decide what the others play.
            drawn = self.draw.replacement(drawn, f"{group_id}/{number}")
        raise ConfigError(
            f"{MAX_HELD_OUT_DRAWS} draws in a row gave examples of evals, which "
            f"separate_eval_samples keeps out of training; {drawn.environment!r} seems to have no "
            "others: lower num_samples"
        )

    async def after_rejection(self, rejected: Cleared, group_id: str) -> Cleared:
        """Return the draw for `group_id`, which replaces `rejected`."""
        return await self.cleared(self.draw.replacement(rejected.drawn, group_id), group_id)


def question_of(
    messages: Sequence[Message], num_turns: int, golden_answers: Mapping[str, str]
) -> int | None:
    """Return a digest of what a rollout was asked, and of what is right; None if it is not known.

    It is the same under every id and name of an environment, within one process. `messages` are
    those of the rollout, and `num_turns` of them the policy has written.
    """
    written = turns_in(messages, num_turns)
    if not written or not golden_answers:
        # Without a right answer, equal words may ask for different things.
        return None
    asked = tuple((one.role, one.content, one.images) for one in messages[: written[0]])
    return hash((asked, *sorted(golden_answers.items())))


def eval_split(entry: EvalEntry, description: EnvironmentDescription) -> Split:
    """Return the split of an eval: the training split if there is no other."""
    if entry.separate_eval_samples and Split.EVAL not in description.num_examples:
        return Split.TRAIN
    return Split(entry.split)


async def hold_out(
    config: TrainConfig,
    training: Mapping[str, EnvironmentClient],
    evals: Mapping[str, EnvironmentClient],
    descriptions: Mapping[str, EnvironmentDescription],
    records: Mapping[str, EnvironmentRecord],
) -> dict[str, HeldOut]:
    """Return the ids held out of each training environment; reads the examples of the evals."""
    found: dict[str, HeldOut] = {}
    for entry in config.environments:
        ids: set[str] = set()
        indices: set[int] = set()
        trained = Split(entry.split)
        for eval_entry in _separated(config):
            if _environment_id(records, eval_entry) == _environment_id(records, entry):
                client = evals[eval_entry.name]
                description = await client.describe()
                split = eval_split(eval_entry, description)
                played = range(num_played(eval_entry, description.num_examples[split]))
                ids.update(await _ids(client, split, played))
                if split is trained and eval_entry.env == entry.env:
                    indices.update(played)
        if ids:
            size = descriptions[entry.name].num_examples.get(trained)
            if size is not None and len(ids) >= size:
                # Nothing may be left. Only then is every training example read.
                here = await _ids(training[entry.name], trained, range(size))
                indices.update(index for index, name in enumerate(here) if name in ids)
            found[entry.name] = HeldOut(ids=frozenset(ids), indices=frozenset(indices))
    return found


def require_untrained(
    held_out: Mapping[str, HeldOut], trained: Set[tuple[str, str]] | None
) -> None:
    """Raise ConfigError if evals hold out examples of earlier steps, (entry, example id).

    This happens when a resumed run evaluates on other examples than before. None: nobody knows what
    was trained on, so nothing can be held out.
    """
    if trained is None:
        if any(held.ids for held in held_out.values()):
            raise ConfigError(
                "evals hold out examples, but the checkpoint is no longer in the folder of its "
                "run, which says what was trained on; put it back there, or turn "
                "separate_eval_samples off"
            )
    elif both := _in_both(held_out, trained):
        name, example_id = both[0]
        raise ConfigError(
            f"evals hold out {len(held_out[name].ids)} examples of {name!r}, but the run that is "
            f"resumed has trained on {sum(one[0] == name for one in both)} of them, such as "
            f"{example_id!r}; evaluate on the same examples as before, or turn "
            "separate_eval_samples off"
        )


def _in_both(
    held_out: Mapping[str, HeldOut], examples: Set[tuple[str, str]]
) -> list[tuple[str, str]]:
    return sorted(
        (name, example_id)
        for name, example_id in examples
        if name in held_out and example_id in held_out[name].ids
    )


def num_played(entry: EvalEntry, size: int | None) -> int:
    """Return how many examples an eval plays of a split of `size`; None = it is endless."""
    wanted = entry.num_samples or EVAL_SAMPLES
    return wanted if size is None else min(wanted, size)


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
    """Return an id that all names of one environment share; None if it is not known."""
    record = records.get(entry.name)
    return None if record is None else record.id.partition("@")[0]


def _separated(config: TrainConfig) -> list[EvalEntry]:
    return [entry for entry in config.evals.evals if entry.separate_eval_samples]


async def _ids(client: EnvironmentClient, split: Split, indices: Sequence[int]) -> list[str]:
    found: list[str] = []
    for start in range(0, len(indices), _AT_A_TIME):
        part = indices[start : start + _AT_A_TIME]
        examples = await asyncio.gather(*(client.example(split, index) for index in part))
        found += [example.id for example in examples]
    return found
