"""`IFEval`: one prompt with instructions, one reply, and which of them it follows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from pydantic import model_validator

from telescope_core import (
    EnvironmentConfig,
    Example,
    ExampleSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    metric,
    reward,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec
from telescope_core.errors import ConfigError, unknown_name
from telescope_core.example_checks import as_text
from telescope_core.parsers import without_thinking
from telescope_env_telescope_ifeval.checks import NAMES, arguments_of
from telescope_env_telescope_ifeval.languages import DetectedLanguages
from telescope_env_telescope_ifeval.scores import (
    Instruction,
    followed_loosely,
    followed_strictly,
)

DATASET = "google/IFEval"
REVISION = "966cd89545d6b6acfd7638bc708b98261ca58e84"
_MAX_REPLY = 200_000
"""Characters of a reply that are checked; a longer one follows nothing."""


class IFEval(SingleTurnEnvironment):
    """Prompts with instructions that a program can check, such as a number of words."""

    class Config(EnvironmentConfig):
        """Where the prompts come from, and what the reward is."""

        score: Literal["prompt", "instruction"] = "prompt"
        """prompt: 1 if every instruction is followed; instruction: the share that is followed."""
        strictness: Literal["strict", "loose"] = "strict"
        """loose: a first or last line, and stars, may be too much."""
        path: str = DATASET
        """The dataset on the Hub, or a local file or folder with its columns."""
        revision: str = ""
        """Commit, tag or branch; empty = the pinned commit."""
        data_folder: str = ""
        """Where downloads are kept; empty = the library's own cache."""

        @model_validator(mode="after")
        def _other_paths_are_pinned(self) -> Self:
            is_ours = self.path == DATASET or self.is_local
            if not is_ours and not self.revision:
                raise ValueError(
                    f"path {self.path!r} is no local folder or file; to read it from the Hub set "
                    "env.revision to a commit of it"
                )
            return self

        @property
        def is_local(self) -> bool:
            """Whether the prompts are on this machine."""
            return DatasetSpec(path=self.path).local is not None

        def dataset_spec(self) -> DatasetSpec:
            """Return the table to read; all of it is for evals."""
            return DatasetSpec(
                path=self.path,
                revision=self.revision or REVISION,
                train_split="",
                eval_split="train",
                cache_dir=self.data_folder,
            )

    config: Config
    network = "load"

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        if self.config.is_local:
            self.network = "none"
        self.languages = DetectedLanguages()

    def splits(self) -> tuple[Split, ...]:
        """Return the eval split: there is nothing to train on."""
        return (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return the prompts."""
        return DatasetSource(self.config.dataset_spec(), split, make=example_of)

    def dataset_revisions(self) -> dict[str, str]:
        """Return the dataset's commit; empty if it is read from this machine."""
        return self.config.dataset_spec().revisions()

    def gold_answer(self, example: Example) -> str | None:
        """Return the row's own reply, if it has one; the dataset has none."""
        gold = example.info.get("gold")
        return str(gold) if gold else None

    @reward
    def follows(self, rollout: Rollout, example: Example) -> float:
        """Whether all instructions are followed, or the share of them, as the settings say."""
        followed = self._followed(rollout, example, self.config.strictness)
        return float(all(followed)) if self.config.score == "prompt" else _share(followed)

    @metric
    def prompt_strict(self, rollout: Rollout, example: Example) -> float:
        """1 when every instruction is followed as the reply stands."""
        return float(all(self._followed(rollout, example, "strict")))

    @metric
    def prompt_loose(self, rollout: Rollout, example: Example) -> float:
        """1 when every instruction is followed by the reply or a variant of it."""
        return float(all(self._followed(rollout, example, "loose")))

    @metric
    def instructions_strict(self, rollout: Rollout, example: Example) -> float:
        """Number of instructions that are followed as the reply stands."""
        return float(sum(self._followed(rollout, example, "strict")))

    @metric
    def instructions_loose(self, rollout: Rollout, example: Example) -> float:
        """Number of instructions that are followed by the reply or a variant of it."""
        return float(sum(self._followed(rollout, example, "loose")))

    @metric
    def num_instructions(self, rollout: Rollout, example: Example) -> float:
        """Number of instructions of the prompt."""
        return float(len(instructions_of(example)))

    def _followed(self, rollout: Rollout, example: Example, strictness: str) -> tuple[bool, ...]:
        instructions = instructions_of(example)
        reply = without_thinking(rollout.completion_text)
        if len(reply) > _MAX_REPLY:
            return (False,) * len(instructions)
        check = followed_strictly if strictness == "strict" else followed_loosely
        return check(reply, instructions, self.languages)


def _share(followed: Sequence[bool]) -> float:
    return sum(followed) / len(followed)


def instructions_of(example: Example) -> list[Instruction]:
    """Return the instructions of `example` with their arguments."""
    rows = cast(Sequence[Mapping[str, Any]], example.info["instructions"])
    return [Instruction(name=row["name"], given=row["given"]) for row in rows]


def example_of(row: Mapping[str, object]) -> Example:
    """Return the prompt in `row`; raises ConfigError for an instruction that is not known."""
    key = as_text(row["key"], "the column 'key'")
    prompt = as_text(row["prompt"], f"row {key}: the column 'prompt'")
    names = cast(Sequence[str], row["instruction_id_list"])
    given = cast(Sequence[Mapping[str, Any] | None], row["kwargs"])
    if not names or len(names) != len(given):
        raise ConfigError(
            f"row {key} has {len(names)} instructions and arguments for {len(given)}; it must have "
            "the same number of both, and at least one"
        )
    instructions: list[dict[str, Any]] = [
        {"name": name, "given": _given(name, arguments or {}, key)}
        for name, arguments in zip(names, given, strict=True)
    ]
    gold = {"gold": str(row["gold"])} if row.get("gold") else {}
    return Example(id=key, prompt=prompt, info={"instructions": instructions, **gold})


def _given(name: str, arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    if name not in NAMES:
        raise unknown_name("instruction", name, NAMES, f"(row {key})")
    needed = arguments_of(name)
    missing = [one for one in needed if arguments.get(one) is None]
    if missing:
        raise ConfigError(f"row {key}: {name} needs {', '.join(missing)}; correct its kwargs")
    return {one: arguments[one] for one in needed}
