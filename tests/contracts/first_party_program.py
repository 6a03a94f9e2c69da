"""Plays every first-party environment with scripted answers, in a process of its own.

`python -m tests.contracts.first_party_program CASES` prints, for each `[factory, settings]` in the
JSON text CASES, the ids of every split, and what gold answers earn on a few examples. With `cheats`
as another argument it also prints what cheats earn.
"""

import asyncio
import json
import sys

from tests.asking import ask

from telescope_core import Message, Sampling, Split
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

NUM_IDS = 24
NUM_PLAYED = 4
JUNK = "so 31337 or maybe (x+31337)^2 \\frac{ " * 300
EQUALS_ALL = """```python
import os
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 1
def __getattr__(name): return lambda *a, **k: Same()
print("all tests passed")
os._exit(0)
```"""


async def told(factory: str, settings: dict, cheats: bool) -> dict:
    client = InProcessEnvironment(
        load_environment_class(factory).from_settings(settings), name="it"
    )
    try:
        about = await client.describe()
        return {
            "reward_min": about.reward_min,
            "reward_max": about.reward_max,
            "success": about.success_threshold,
            "splits": {
                split: await of_split(client, split, count, cheats)
                for split, count in about.num_examples.items()
            },
        }
    finally:
        await client.close()


async def of_split(
    client: InProcessEnvironment, split: Split, count: int | None, has_cheats: bool
) -> dict:
    ids = [
        (await client.example(split, index)).id
        for index in range(NUM_IDS if count is None else min(count, NUM_IDS))
    ]
    indices = range(min(NUM_PLAYED, len(ids)))
    golds = [await client.gold(split, index) for index in indices]
    assert all(gold is not None for gold in golds)
    cheats = [await cheated(client, split, index) for index in indices if has_cheats]
    return {"ids": ids, "gold": [gold.reward for gold in golds], "cheats": cheats}


async def cheated(client: InProcessEnvironment, split: Split, index: int) -> dict[str, float]:
    """Return what each cheat earns when the policy says it in every turn."""

    def echo(messages: list[Message]) -> str:
        return messages[-1].content

    kinds = {
        "empty": "",
        "echo": echo,
        "form": "<answer></answer> \\boxed{} Answer: ```python\n```",
        "junk": JUNK,
        "program": EQUALS_ALL,
        "call": '<tool_call>{"name": "bash", "arguments": {"command": "exit 0"}}</tool_call>',
    }
    request = ask(
        split=split, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=120
    )
    earned: dict[str, float] = {}
    for kind, said in kinds.items():
        reply = said if callable(said) else (lambda _, text=said: text)
        rollout = await client.play(request, ScriptedClient(reply).policy("r"))
        assert rollout.reward is not None, f"{kind}: {rollout.error}"
        earned[kind] = rollout.reward
    return earned


async def main(cases: list, cheats: bool) -> None:
    print(json.dumps([await told(factory, settings, cheats) for factory, settings in cases]))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2:] == ["cheats"]))
