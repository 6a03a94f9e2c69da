"""Loads environments of datasets in a process of its own, since `datasets` reads variables once.

`python -m tests.environments.dataset_program CASES KINDS` prints, for each `[factory, settings]` in
the JSON text CASES, the examples of every split and what scripted answers earn with them: those of
the kinds in the JSON text KINDS. Junk, which is long, is tried on the first example of a split.
"""

import asyncio
import json
import sys

from telescope_core import Environment, Example, Message, Rollout
from telescope_core.errors import TelescopeError
from telescope_core.finding.locate import load_environment_class
from telescope_core.playing.rollout import score_rollout

JUNK_CHARACTERS = 100_000


async def earned(environment: Environment, example: Example, text: str) -> dict:
    messages = (*environment.initial_messages(example), Message(role="assistant", content=text))
    rollout = Rollout(
        environment="it", example_id=example.id, group_id="g", index=0, messages=messages
    )
    scored = await score_rollout(environment, rollout, example)
    return {"reward": scored.reward, "metrics": dict(scored.metrics)}


async def played(
    environment: Environment, example: Example, other: Example, kinds: set[str]
) -> dict:
    opening = environment.initial_messages(example)
    gold = environment.gold_answer(example) or ""
    texts = {
        "gold": gold,
        "empty": "",
        "echo": opening[-1].content,
        "other": environment.gold_answer(other) or "",
        "form": "\\boxed{}",
        "form_of_line": "Answer:",
        "junk": ("so 31337 or maybe (x+31337)^2 \\frac{ " * (JUNK_CHARACTERS // 30 + 1))[
            :JUNK_CHARACTERS
        ],
    }
    return {
        "id": example.id,
        "prompt": [message.content for message in opening],
        "answer": example.answer,
        "info": dict(example.info),
        "gold": gold,
        "earned": {
            kind: await earned(environment, example, text)
            for kind, text in texts.items()
            if kind in kinds
        },
    }


async def told(factory: str, settings: dict, kinds: set[str]) -> dict:
    environment = load_environment_class(factory).from_settings(settings)
    splits = {}
    try:
        for split in environment.splits():
            source = await asyncio.to_thread(environment.fetcher.source, split)
            examples = [source.example(index) for index in range(source.num_examples)]
            splits[split] = [
                await played(
                    environment,
                    one,
                    examples[(at + 1) % len(examples)],
                    kinds - ({"junk"} if at else set()),
                )
                for at, one in enumerate(examples)
            ]
        return {
            "splits": splits,
            "revisions": environment.dataset_revisions(),
            "network": environment.network,
        }
    except TelescopeError as error:
        return {"error": str(error)}
    finally:
        await environment.close()


async def main(cases: list, kinds: set[str]) -> None:
    print(json.dumps([await told(factory, settings, kinds) for factory, settings in cases]))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), set(json.loads(sys.argv[2]))))
