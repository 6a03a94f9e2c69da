"""The task of both sides: sums with one right answer, and the mock server's replies to them.

Standard library only: it is imported in the peer's virtual environment too.
"""

import json
import random
import re
from typing import Any

NUM_PROBLEMS = 64
NUM_TOKENS = 256
MODEL = "mock"
SAMPLING: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 1.0}
MEAN_REWARD = 0.75
_ANSWER = re.compile(r"####\s*(-?[\d,]+)")


def question(index: int) -> str:
    """Return the problem's text; the server finds the number in it."""
    first, second = _terms(index)
    return (
        f"Problem {index:03d}. A shop sold {first} apples on Monday and {second} on Tuesday. How "
        "many did it sell? Think step by step, and end with #### and the number alone."
    )


def answer(index: int) -> str:
    """Return the right answer."""
    return str(sum(_terms(index)))


def score(completion: str, expected: str) -> float:
    """Return 1 for a completion whose last `####` is followed by the right number, else 0."""
    found = _ANSWER.findall(completion)
    return float(bool(found) and int(found[-1].replace(",", "")) == int(expected))


def reply(index: int) -> bytes:
    """Return the chat completion of a problem as vLLM writes it; each fourth one is wrong."""
    rng = random.Random(index)
    right = int(answer(index))
    words = [f" w{rng.randrange(10_000)}" for _ in range(NUM_TOKENS - 2)]
    words += [" ####", f" {right + (index % 4 == 0)}"]
    entries = [
        {
            "token": word,
            "logprob": -rng.expovariate(2.0),
            "bytes": list(word.encode()),
            "top_logprobs": [],
        }
        for word in words
    ]
    fields = {
        "id": f"chatcmpl-{index}",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(words)},
                "logprobs": {"content": entries},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [rng.randrange(150_000) for _ in words],
            }
        ],
        "usage": {
            "prompt_tokens": 48,
            "completion_tokens": NUM_TOKENS,
            "total_tokens": 48 + NUM_TOKENS,
        },
        "prompt_token_ids": [rng.randrange(150_000) for _ in range(48)],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _terms(index: int) -> tuple[int, int]:
    rng = random.Random(1000 + index)
    return rng.randrange(100, 900), rng.randrange(100, 900)
