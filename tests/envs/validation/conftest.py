"""Runs single levels of validation on environments that a test defines, in this process."""

import asyncio
from pathlib import Path

import pytest

from telescope_core import Environment
from telescope_core.probes.answers import Answers
from telescope_core.probes.leakage import look_for_leaks
from telescope_core.probes.load import (
    build,
    check_datasets,
    check_declarations,
    read_examples,
)
from telescope_core.probes.reward import check_rewards
from telescope_envs.validation import Outcome
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.processes import read_answers

NUM_EXAMPLES = 3


class Tried:
    """What the checks said of one environment."""

    def __init__(self, findings: Findings) -> None:
        self.results = {check.id: check for check in findings.results("")}
        self.facts = findings.facts

    @property
    def found(self) -> list[str]:
        return [name for name, check in self.results.items() if check.evidence]

    def require_only_failure(self, check: str) -> None:
        """Assert that `check` found something and failed for it, and no other did."""
        assert self.found == [check]
        assert self.results[check].outcome is Outcome.FAIL

    def evidence(self, check: str):
        return self.results[check].evidence[0]


@pytest.fixture
def try_out(tmp_path):
    """Return a function that runs one level on an environment class."""

    def run(level: str, environment_class: type[Environment], num_examples=NUM_EXAMPLES) -> Tried:
        path = tmp_path / "answers.jsonl"
        answers = Answers(path)
        environment = build(environment_class, answers)
        if environment is not None:
            if level == "load":
                check_declarations(environment, answers)
                read_examples(environment, num_examples, answers)
                check_datasets(environment, answers)
            elif level == "reward":
                own = str(Path(__file__).parent)
                asyncio.run(check_rewards(environment, num_examples, answers, own_folder=own))
            else:
                asyncio.run(look_for_leaks(environment, num_examples, answers))
        answers.close()
        findings = Findings()
        read_answers(path).tell(findings)
        return Tried(findings)

    return run
