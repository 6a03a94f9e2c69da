"""Evals on the run's own servers, by the code of `telescope eval` with token-exact policies."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from telescope_core.base.protocols import EnvironmentClient, PolicySource
from telescope_core.base.secret_names import secret_values
from telescope_core.base.types import Sampling, Split, WeightVersion
from telescope_core.evals import EvalFolder, EvalResult, EvalSettings, read_result, run_eval
from telescope_core.records import RolloutRow, RunFolder
from telescope_train.config.eval_folders import due_evals, eval_path, missing_evals, step_tag
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.rollouts.held_out import eval_split, question_of


class PlayedEval(NamedTuple):
    """A completed eval."""

    result: EvalResult
    versions: frozenset[WeightVersion]
    """Versions of the weights that sampled its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvals:
    """The evals of a run. `play` plays one and records it in its folder."""

    config: TrainConfig
    environments: Mapping[str, EnvironmentClient]
    """Name of the eval entry -> its environment."""
    policies: PolicySource
    folder: RunFolder
    concurrency: int
    """Most rollouts per server that are played at once."""
    questions: set[int] = field(default_factory=set[int])
    """`question_of` of the examples that were played so far."""

    def due(self, step: int) -> list[EvalEntry]:
        """Return the evals that are due after `step`."""
        return due_evals(self.config, step)

    def unfinished(self, step: int) -> list[EvalEntry]:
        """Return the evals that were due after `step` and have no result."""
        return self.missing(self.due(step), step_tag(step))

    def missing(self, entries: Sequence[EvalEntry], tag: str) -> list[EvalEntry]:
        """Return those of `entries` that have no result of this `tag` yet."""
        return missing_evals(entries, self.folder, tag)

    async def play(self, entry: EvalEntry, tag: str, *, num_servers: int = 1) -> PlayedEval:
        """Play one eval on the given number of servers; removes the files of an interrupted one."""
        description = await self.environments[entry.name].describe()
        settings = eval_settings(
            entry,
            self.config,
            concurrency=self.concurrency * num_servers,
            split=eval_split(entry, description),
        )
        path = eval_path(self.folder, entry, tag)
        if path.exists() and read_result(path) is None:
            shutil.rmtree(path)
        folder = EvalFolder.create(path, manifest={"tag": tag, **entry.model_dump(mode="json")})
        folder.hide = secret_values(entry.env) | secret_values(os.environ)
        versions: set[WeightVersion] = set()

        def record(row: RolloutRow) -> None:
            folder.append(row)
            known = (row.oldest_version, row.newest_version)
            versions.update(version for version in known if version is not None)
            question = question_of(row.messages, row.num_turns, row.golden_answers)
            if question is not None:
                self.questions.add(question)

        try:
            result = await run_eval(
                self.environments[entry.name],
                self.policies,
                settings,
                model=f"{self.config.run.name} ({tag})",
                on_rollout=record,
                on_attempt=folder.append_attempt,
            )
        except BaseException as error:
            folder.fail(f"{type(error).__name__}: {error}")
            raise
        environment_record = self.folder.info().environments.get(entry.name)
        result = replace(result, environment_record=environment_record)
        folder.finish(result)
        return PlayedEval(result, frozenset(versions))


def eval_settings(
    entry: EvalEntry, config: TrainConfig, *, concurrency: int, split: Split = Split.EVAL
) -> EvalSettings:
    """Return the settings of the eval `entry`, completed from `[rollout]`."""
    return EvalSettings(
        num_examples=entry.num_samples,
        rollouts=entry.rollouts,
        ks=entry.pass_k,
        sampling=Sampling(
            max_tokens=entry.max_tokens or config.rollout.max_tokens,
            temperature=entry.temperature,
            top_p=entry.top_p,
            top_k=entry.top_k or -1,
            min_p=entry.min_p,
            repetition_penalty=entry.repetition_penalty,
            stop=config.rollout.stop,
            include_stop_str_in_output=(
                bool(config.rollout.stop) and config.rollout.include_stop_str_in_output
            ),
            seed=config.run.seed if config.rollout.seed_sampling else None,
        ),
        concurrency=concurrency,
        split=split,
        deadline_s=config.rollout.rollout_timeout_s,
    )
