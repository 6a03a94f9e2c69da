"""Convert one of our environments to one of the `verifiers` package, for training with that.

`verifiers_environment(environment)` is the return value for a `load_environment` of verifiers.
Their loop calls the model, while our `play` waits for the answers, and the reward is ours. Tools
are refused, because their loop must know the tools before the rollout begins.
"""

import itertools
from typing import Any

from telescope_adapters.frameworks import VERIFIERS_SERVED, imported
from telescope_adapters.serving.inside_out import ModelCall, Stepped
from telescope_adapters.verifiers import as_messages
from telescope_core.base.errors import ConfigError
from telescope_core.base.messages import message_to_json
from telescope_core.base.types import Completion, Rollout, RolloutStatus, Split
from telescope_core.environments import Environment
from telescope_core.playing.in_process import InProcessEnvironment


def verifiers_environment(
    environment: Environment, *, name: str, num_examples: int | None = None
) -> Any:
    """Return `environment` as a `MultiTurnEnv` of verifiers.

    `num_examples` is how many examples of each split their datasets have; endless splits need it.
    """
    verifiers: Any = imported(VERIFIERS_SERVED, "verifiers")
    datasets: Any = imported(VERIFIERS_SERVED, "datasets")
    splits = environment.splits()
    made = {
        split: datasets.Dataset.from_list(_rows(environment, split, num_examples))
        for split in splits
    }
    parts: dict[str, Any] = {
        "client": InProcessEnvironment(environment, name=name),
        "numbers": itertools.count(),
        "error_class": verifiers.InfraError,
        "ends": verifiers.cleanup(_end),
    }
    served: Any = type("TelescopeEnv", (_ServedSession, verifiers.MultiTurnEnv), parts)
    return served(
        dataset=made.get(Split.TRAIN),
        eval_dataset=made.get(Split.EVAL),
        rubric=verifiers.Rubric(funcs=[telescope_reward]),
        max_turns=-1,
    )


async def telescope_reward(state: Any) -> float:
    """Return the reward of the rollout."""
    return float(state["telescope_rollout"].reward)


class _ServedSession:
    """Methods of verifiers' environment class; the state of a rollout is in their `state`."""

    client: InProcessEnvironment
    numbers: "itertools.count[int]"
    error_class: type[Exception]

    async def setup_state(self, state: Any) -> Any:
        """Start the rollout of the row's example."""
        about = state["info"]
        group_id = f"verifiers-{next(self.numbers)}"
        state["telescope"] = Stepped(self.client, about["split"], about["index"], group_id=group_id)
        state["prompt"] = self._shown(await state["telescope"].begun(), state)
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """Raise: an environment's reply may replace the conversation, so it is a whole prompt."""
        raise AssertionError("get_prompt_messages is all that their loop asks")

    async def get_prompt_messages(self, state: Any) -> Any:
        """Pass the model's answer, and return the whole of the environment's next request."""
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        said = as_messages([last["completion"][-1]])[0]
        answer = Completion(
            message=said, finish_reason="length" if last["is_truncated"] else "stop"
        )
        return self._shown(await state["telescope"].answered(answer), state)

    async def render_completion(self, state: Any) -> None:
        """Record what was said after the prompt; of a rewritten conversation, the last form."""
        turns = state["trajectory"]
        talk = [*turns[-1]["prompt"], *turns[-1]["completion"]] if turns else []
        prompt = list(state["prompt"])
        state["completion"] = talk[len(prompt) :] if talk[: len(prompt)] == prompt else talk

    def _shown(self, what: ModelCall | Rollout, state: Any) -> list[dict[str, Any]]:
        if isinstance(what, Rollout):
            if what.status is not RolloutStatus.KEPT:
                raise self.error_class(f"the rollout is {what.status}: {what.error}")
            state["telescope_rollout"], state["final_env_response"] = what, []
            return []
        if what.tools:
            raise ConfigError(
                f"{self.client.name} offers tools with its requests, which cannot be served to "
                "verifiers; use an environment whose tool calls are text"
            )
        return [message_to_json(one) for one in what.messages]


async def _end(self: Any, state: Any) -> None:
    """End a rollout that verifiers' loop has left."""
    stepped: Stepped | None = state.pop("telescope", None)
    if stepped is not None:
        stepped.cancel()


def _rows(environment: Environment, split: Split, wanted: int | None) -> list[dict[str, Any]]:
    source = environment.fetcher.source(split)
    count = source.num_examples if wanted is None else wanted
    if count is None:
        raise ConfigError(f"the split {split} is endless, so num_examples must say how many to use")
    known = count if source.num_examples is None else min(count, source.num_examples)
    rows: list[dict[str, Any]] = []
    for index in range(known):
        example = source.example(index)
        messages = [message_to_json(one) for one in environment.initial_messages(example)]
        info = {"split": split.value, "index": index, "id": example.id}
        rows.append({"prompt": messages, "answer": example.answer, "info": info})
    return rows
