"""What a kind of fault may change in a run, and how it plans what happens later."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.disk import DiskTimes
from tests.simulation.fleet import SimulatedFleet

from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.environments import Workload, bimodal, lognormal
from telescope_train.simulation.run import SimulatedRun
from telescope_train.simulation.servers import ServerTimes
from telescope_train.simulation.trainer import TrainerSpeed


def nothing(run: SimulatedRun, chance: random.Random) -> None:
    """Disturb nothing."""


@dataclass(slots=True, kw_only=True)
class FaultPlan:
    """What a kind of fault changes."""

    workload: Workload
    engine: EngineSpeed
    servers: ServerTimes
    trainer: TrainerSpeed
    scheduling: dict[str, object]
    rollout: dict[str, object] = field(default_factory=dict[str, object])
    fleet: Callable[[Sequence[SimulatedEngine]], SimulatedFleet] | None = None
    disturb: Callable[[SimulatedRun, random.Random], None] = nothing
    kills_s: Sequence[float] = ()
    checkpoint: dict[str, object] = field(default_factory=lambda: {"checkpoint_every": 1})
    disk: DiskTimes = field(default_factory=DiskTimes)
    is_exact: bool = False
    """Whether nothing else goes wrong: weights are then those of a run without these faults."""

    def also(self, disturb: Callable[[SimulatedRun, random.Random], None]) -> None:
        """Let `disturb` happen besides what is planned."""
        before = self.disturb

        def both(run: SimulatedRun, chance: random.Random) -> None:
            before(run, chance)
            disturb(run, chance)

        self.disturb = both


def some_workload(chance: random.Random) -> Workload:
    """Return rollouts of any kind."""
    lengths = chance.choice([lognormal(500, 0.9), bimodal(100, 3000, 0.2), lognormal(50, 0.3)])
    turns = chance.choice([(1, 1), (1, 1), (1, 6)])
    return Workload(lengths=lengths, num_turns=turns, tool_s=chance.choice([0.0, 1.0, 20.0]))


def later(chance: random.Random, action: Callable[[], None]) -> None:
    """Do `action` some time in the first 100 seconds."""
    after(chance.uniform(0, 100), action)


def after(delay_s: float, action: Callable[[], None]) -> None:
    """Do `action` in so many seconds."""
    asyncio.get_running_loop().call_later(delay_s, action)
