"""The real Checkpointer saves simulated runs, whatever goes wrong; what it breaks is noticed."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.simulation.checkpoint_kinds import CHECKPOINT_FAULTS
from tests.simulation.disk import SavingRanks
from tests.simulation.schedules import Ledger, play, played, schedule

from telescope_core.base.file_proofs import FileProof
from telescope_train.checkpoints import saver
from telescope_train.checkpoints.folders import RunCheckpoint
from telescope_train.checkpoints.saver import Checkpointer

KILLED = "driver-killed-while-saving"


def first_with(problem: str, kind: str) -> int | None:
    """Return the first schedule of a kind in which `problem` is found; a crash counts as one."""
    for number in range(12):
        try:
            found = play(schedule(kind, number))
        except (AssertionError, OSError) as error:
            found = [f"{type(error).__name__}: {error}"]
        if any(problem in one for one in found):
            return number
    return None


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(one, marks=[] if one == KILLED else pytest.mark.slow)
        for one in CHECKPOINT_FAULTS
    ],
)
def test_equal_seeds_are_equal_histories(kind: str) -> None:
    def history() -> tuple[str, object]:
        ledger = Ledger()
        return played(schedule(kind, 1), ledger).weights, ledger.digest

    assert history() == history()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("several-while-saving/9", marks=pytest.mark.slow),
        pytest.param("several-while-saving/58", marks=pytest.mark.slow),
        "several-while-saving/95",
    ],
)
def test_a_failure_that_nobody_asks_for_is_not_left_to_asyncio(name: str) -> None:
    kind, _, number = name.rpartition("/")
    assert play(schedule(kind, int(number))) == []


def test_a_checkpoint_that_gets_its_name_too_early_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(self: Checkpointer) -> dict[str, FileProof]:
        return {}

    monkeypatch.setattr(Checkpointer, "_until_ranks_are_done", at_once)
    assert first_with("", KILLED) is not None


@pytest.mark.slow
def test_weights_of_another_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = SavingRanks.load_checkpoint

    async def behind(self: SavingRanks, folder: Path, proofs: Mapping[str, FileProof]) -> None:
        other = folder.with_name("other")
        shutil.copytree(folder, other, dirs_exist_ok=True)
        path = other / "weights.json"
        path.write_text(json.dumps(json.loads(path.read_text())[:-1]))
        await load(self, other, {})

    monkeypatch.setattr(SavingRanks, "load_checkpoint", behind)
    kind = "ranks-die-while-saving"
    assert first_with("weights learned", kind) is not None
    assert first_with("undisturbed weights", kind) is not None


@pytest.mark.slow
def test_a_retention_that_keeps_the_oldest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(found: list[RunCheckpoint], **rules: object) -> list[RunCheckpoint]:
        return found[1:] if rules["keep_last"] else []

    monkeypatch.setattr(saver, "expendable", newest)
    assert first_with("last checkpoint", KILLED) is not None


def test_leftovers_that_nobody_removes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "sweep", lambda folder: None)
    kind = "several-while-saving"
    assert first_with("FileExistsError", kind) is not None
