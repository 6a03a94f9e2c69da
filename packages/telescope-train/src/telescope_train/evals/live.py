"""Evals on the run's own servers, with the code of `telescope eval` and token-exact policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from telescope_core.evals import EvalFolder, EvalResult, EvalSettings, run_eval
from telescope_core.protocols import EnvironmentClient, PolicySource
from telescope_core.records import RunFolder
from telescope_core.types import Sampling, Split
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.rollouts.held_out import eval_split

BEFORE = "before"
AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvals:
    """The evals of a run. `run` plays evals and records them."""

    config: TrainConfig
    environments: Mapping[str, EnvironmentClient]
    """Name of the eval entry -> its environment."""
    policies: PolicySource
    folder: RunFolder
    concurrency: int
    """Most rollouts that are played at the same time."""

    async def run(
        self, entries: Sequence[EvalEntry], tag: str, *, on_progress: Callable[[str], None]
    ) -> dict[str, EvalResult]:
        """Play `entries` one after the other; returns the results by environment."""
        results: dict[str, EvalResult] = {}
        for entry in entries:
            on_progress(f"eval {tag}: {entry.name}")
            results[entry.name] = await self._one(entry, tag)
        return results

    def due(self, step: int) -> list[EvalEntry]:
        """Return the evals that are due after `step`."""
        return [
            entry
            for entry in self.config.evals.evals
            if entry.eval_every and step % entry.eval_every == 0
        ]

    async def _one(self, entry: EvalEntry, tag: str) -> EvalResult:
        description = await self.environments[entry.name].describe()
        settings = eval_settings(
            entry,
            self.config,
            concurrency=self.concurrency,
            split=eval_split(entry, description),
        )
        folder = EvalFolder.create(
            self.folder.evals_path / eval_folder_name(entry.name, tag),
            manifest={"tag": tag, **entry.model_dump(mode="json")},
        )
        result = await run_eval(
            self.environments[entry.name],
            self.policies,
            settings,
            model=f"{self.config.run.name} ({tag})",
            on_rollout=folder.append,
            on_attempt=folder.append_attempt,
        )
        record = self.folder.info().environments.get(entry.name)
        result = replace(result, environment_record=record)
        folder.finish(result)
        return result


def eval_folder_name(environment: str, tag: str) -> str:
    """Return the name of the folder of an eval; a path in the name of an environment is kept."""
    name = environment.replace("/", "-").replace(":", "-").lstrip(".-")
    return f"{name}-{tag}"


def eval_settings(
    entry: EvalEntry, config: TrainConfig, *, concurrency: int, split: Split = Split.EVAL
) -> EvalSettings:
    """Return the settings of the eval `entry`; what it leaves out comes from `[rollout]`."""
    return EvalSettings(
        num_examples=entry.num_samples,
        rollouts=entry.rollouts,
        ks=entry.pass_k,
        sampling=Sampling(
            max_tokens=entry.max_tokens or config.rollout.max_tokens,
            temperature=entry.temperature,
            stop=config.rollout.stop,
            seed=config.run.seed if config.rollout.seed_sampling else None,
        ),
        concurrency=concurrency,
        split=split,
        deadline_s=config.rollout.rollout_timeout_s,
    )
