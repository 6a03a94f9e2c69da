"""The program of a probe: reads its job, runs it, and writes the results."""

import asyncio
import os
from importlib import import_module
from pathlib import Path

from telescope_core.finding.locate import load_environment_class
from telescope_core.probes.answers import Answers, Job, Kind
from telescope_core.probes.guards import cut_off_network, end_with_parent

_FUNCTIONS: dict[Kind, str] = {
    "load": "load:run_load",
    "reward": "reward:run_reward",
    "scores": "reward:score_again",
    "leakage": "leakage:look_for_leaks",
    "grading": "near_gold:run_near_gold",
}
"""Kind -> `module:function`; one is imported, since only some kinds need the graders."""
_RUNS = frozenset[Kind]({"load", "reward"})
"""Kinds that build the environment themselves."""


def main(text: str) -> None:
    """Run the job in `text`; ends as soon as its supervisor does."""
    job = Job.read(text)
    end_with_parent(os.getppid())
    module, _, name = _FUNCTIONS[job.kind].partition(":")
    run = getattr(import_module(f"telescope_core.probes.{module}"), name)
    answers = Answers(Path(job.output))
    if job.kind in _RUNS:
        run(job, answers)
    else:
        if job.cuts_network:
            cut_off_network()
        environment = load_environment_class(job.factory).from_settings(job.settings)
        asyncio.run(run(environment, job.num_examples, answers))
    answers.close()
