"""verifiers' side: `python -m rollouts.verifiers_peer BASE_URL CONCURRENCY NUM_ROLLOUTS`.

`SingleTurnEnv.generate` with a rubric of one function, as its documentation shows. Runs in a
virtual environment that holds verifiers and not Telescope; prints JSON. Each rollout is scored on
its own, log messages and the progress bar are off, and one client is kept for all calls.
"""

import asyncio
import json
import logging
import os
import sys
import time

import verifiers as vf
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from verifiers.clients import resolve_client
from verifiers.types import ClientConfig

from rollouts.problems import MODEL, NUM_PROBLEMS, SAMPLING, answer, question, score

WITH_TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


def correct(completion: list, answer: str, **_: object) -> float:
    """Score 1 for the right number."""
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return score(content or "", answer)


def rollout_inputs(num_rollouts: int) -> list[dict]:
    """Return one input per rollout, example by example."""
    per_example = num_rollouts // NUM_PROBLEMS
    return [
        {
            "prompt": [{"role": "user", "content": question(index)}],
            "answer": answer(index),
            "example_id": index,
        }
        for index in range(NUM_PROBLEMS)
        for _ in range(per_example)
    ]


async def play(base_url: str, concurrency: int, num_rollouts: int) -> dict[str, float]:
    """Play the rollouts and return speed, CPU time and the mean reward."""
    os.environ.setdefault("BENCH_API_KEY", "none")
    client = resolve_client(ClientConfig(api_base_url=base_url, api_key_var="BENCH_API_KEY"))
    rows = [{"question": question(i), "answer": answer(i)} for i in range(NUM_PROBLEMS)]
    environment = vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct], weights=[1.0])
    )

    async def generate(number: int, *columns: str) -> list:
        outputs = await environment.generate(
            rollout_inputs(number),
            client,
            MODEL,
            sampling_args={**SAMPLING, **WITH_TOKENS},
            max_concurrent=concurrency,
            independent_scoring=True,
            state_columns=list(columns),
            on_start=lambda *_: None,
            on_progress=lambda *_: None,
            on_log=lambda _: None,
        )
        return outputs["outputs"]

    tokens = (await generate(NUM_PROBLEMS, "trajectory"))[-1]["trajectory"][0]["tokens"]
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    outputs = await generate(num_rollouts)
    seconds = time.perf_counter() - started_s
    cpu_s = time.process_time() - started_cpu_s
    await client.close()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "num_scored": len(outputs),
        "mean_reward": sum(output["reward"] for output in outputs) / len(outputs),
        "num_tokens": len(tokens["completion_ids"]) if tokens else 0,
    }


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    disable_progress_bar()
    _, base_url, concurrency, num_rollouts = sys.argv
    print(json.dumps(asyncio.run(play(base_url, int(concurrency), int(num_rollouts)))))
