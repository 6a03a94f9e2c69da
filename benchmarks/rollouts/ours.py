"""Telescope's side: `python -m rollouts.ours BASE_URL CONCURRENCY NUM_ROLLOUTS`, prints JSON."""

import asyncio
import json
import sys
import time
from dataclasses import replace

from rollouts.problems import MODEL, NUM_PROBLEMS, NUM_TOKENS, answer, question, score
from telescope_core import Example, ListSource, Rollout, Sampling, SingleTurnEnvironment, Split
from telescope_core.chat.client import ChatClient
from telescope_core.environments import reward
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.in_process import InProcessEnvironment


class Sums(SingleTurnEnvironment):
    """The problems, as an author would write them."""

    def examples(self, split: Split) -> ListSource:
        """Return the same problems for both splits."""
        return EXAMPLES

    @reward
    def correct(self, rollout: Rollout, example: Example) -> float:
        """Score 1 for the right number."""
        return score(rollout.completion_text, example.answer)


EXAMPLES = ListSource(
    [
        Example(id=f"p{index}", prompt=question(index), answer=answer(index))
        for index in range(NUM_PROBLEMS)
    ]
)


async def play(base_url: str, concurrency: int, num_rollouts: int) -> dict[str, float]:
    """Play the rollouts and return speed, CPU time and the mean reward."""
    client = ChatClient(base_url, MODEL, with_tokens=True)
    environment = InProcessEnvironment(Sums(), name="sums")
    settings = EvalSettings(
        num_examples=NUM_PROBLEMS,
        rollouts=num_rollouts // NUM_PROBLEMS,
        sampling=Sampling(max_tokens=NUM_TOKENS),
        concurrency=concurrency,
        deadline_s=300.0,
    )
    await run_eval(environment, client, replace(settings, rollouts=1))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    result = await run_eval(environment, client, settings)
    seconds = time.perf_counter() - started_s
    cpu_s = time.process_time() - started_cpu_s
    await client.close()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "num_scored": result.num_scored,
        "mean_reward": result.reward.mean if result.reward else 0.0,
    }


if __name__ == "__main__":
    _, base_url, concurrency, num_rollouts = sys.argv
    print(json.dumps(asyncio.run(play(base_url, int(concurrency), int(num_rollouts)))))
