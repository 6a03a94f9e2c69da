"""verifiers' present side: `python -m rollouts.verifiers_v1 BASE_URL CONCURRENCY NUM_ROLLOUTS`.

Since 0.4 an environment is a taskset that a harness plays, and every rollout runs the harness's
program in a process of its own; `null`, the one used here, only asks the model. Prints JSON.
"""

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

import verifiers.v1 as vf

from rollouts.problems import MODEL, NUM_PROBLEMS, SAMPLING, answer, question, score

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """One problem."""

    expected: str


class SumTask(vf.Task[SumData]):
    """Scores one problem."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Score 1 for the right number."""
        return score(trace.last_reply or "", self.data.expected)


class Sums(vf.Taskset[SumTask]):
    """The problems."""

    def load(self) -> list[SumTask]:
        """Return all of them."""
        return [
            SumTask(SumData(prompt=question(i), expected=answer(i)), self.config.task)
            for i in range(NUM_PROBLEMS)
        ]


async def play(base_url: str, concurrency: int, num_rollouts: int) -> dict[str, float]:
    """Play the rollouts and return speed and the mean reward; CPU time is that of one process."""
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig.model_validate(
        {"taskset": {"id": "verifiers_v1"}, "agent": seat}
    )
    environment = vf.load_environment(config)
    sampling = vf.SamplingConfig(**SAMPLING, logprobs=True, return_token_ids=True)
    context = vf.ModelContext(
        client=vf.EvalClientConfig(base_url=base_url), model=MODEL, sampling=sampling
    )
    gate = asyncio.Semaphore(concurrency)
    tasks = list(environment.taskset)

    async def generate(number: int) -> list[vf.Episode]:
        slots = [
            s
            for task in tasks[:number]
            for s in environment.slots(task, -(-number // NUM_PROBLEMS))
        ]
        return await asyncio.gather(
            *(environment.run_slot(slot, context, gate) for slot in slots[:number])
        )

    async with environment.serving():
        await generate(2)
        started_s = time.perf_counter()
        episodes = await generate(num_rollouts)
        seconds = time.perf_counter() - started_s
    failed = [e.errors or e.traces[0].errors for e in episodes if not e.ok]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(episodes)} failed, the first one with {failed[0]}")
    rewards = [episode.traces[0].reward for episode in episodes]
    return {
        "seconds": seconds,
        "num_scored": len(rewards),
        "mean_reward": sum(rewards) / len(rewards),
    }


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    # verifiers imports a taskset by the name of a module at the top.
    sys.path.insert(0, str(Path(__file__).parent))
    _, base_url, concurrency, num_rollouts = sys.argv
    print(json.dumps(asyncio.run(play(base_url, int(concurrency), int(num_rollouts)))))
