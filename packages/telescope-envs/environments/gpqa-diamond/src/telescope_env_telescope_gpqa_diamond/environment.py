"""`GpqaDiamond`: one question, four choices, one letter."""

import threading
from collections.abc import Sequence
from typing import Any, cast

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    metric,
    reward,
    runs_in,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec
from telescope_env_telescope_gpqa_diamond.choices import LETTERS, letter_in
from telescope_env_telescope_gpqa_diamond.source import (
    DATASET,
    commit_of,
    example_of,
    hub_spec,
    require_token,
)

INSTRUCTION = (
    'Think step by step. End with a line "Answer: X", where X is the letter of the right choice.'
)


class GpqaDiamond(SingleTurnEnvironment):
    """Questions of biology, physics and chemistry at the level of a doctorate; four choices."""

    class Config(EnvironmentConfig):
        """Where the questions come from, and how they are asked."""

        path: str = DATASET
        """The dataset on the Hub, or a local file or folder with its columns."""
        revision: str = "main"
        """Commit, tag or branch; a branch is replaced by the commit at which it is, and that commit
        is recorded."""
        instruction: str = INSTRUCTION
        """Follows the choices; empty asks nothing more."""
        data_folder: str = ""
        """Where downloads are kept; empty = the library's own cache."""

        @property
        def is_local(self) -> bool:
            """Whether the questions are on this machine."""
            return DatasetSpec(path=self.path).local is not None

    config: Config
    network = "load"
    secrets = ("HF_TOKEN",)

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        if self.config.is_local:
            self.network = "none"
        self._lock = threading.Lock()
        self._commit = ""

    def splits(self) -> tuple[Split, ...]:
        """Return the eval split: there is nothing to train on."""
        return (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return the questions; raises ConfigError without a token of the Hub."""
        config = self.config
        if config.is_local:
            spec = DatasetSpec(path=config.path, train_split="", eval_split="train")
        else:
            spec = hub_spec(config.path, self.commit(), config.data_folder)
        return DatasetSource(spec, split, make=example_of)

    def commit(self) -> str:
        """Return the commit that is read, which a branch may have to be asked for once."""
        with self._lock:
            if not self._commit:
                require_token(self.config.path)
                self._commit = commit_of(self.config.path, self.config.revision)
            return self._commit

    def dataset_revisions(self) -> dict[str, str]:
        """Return the dataset's commit; empty if it is read from this machine."""
        return {} if self.config.is_local else {self.config.path: self.commit()}

    @runs_in("loop")
    def format_prompt(self, example: Example) -> str:
        """Return the question, the choices by letter, and the instruction."""
        choices = cast(Sequence[str], example.info["choices"])
        lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
        parts = [str(example.prompt), "\n".join(lines), self.config.instruction]
        return "\n\n".join(part for part in parts if part)

    def gold_answer(self, example: Example) -> str | None:
        """Return the line with the right letter."""
        return f"Answer: {example.answer}"

    @reward
    def correct(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """1 when the reply settles on the right letter, which is its vote in maj@k."""
        letter = letter_in(rollout.completion_text)
        if letter:
            episode.tags["answer"] = letter
        return float(letter == example.answer)

    @metric
    def has_letter(self, rollout: Rollout, example: Example) -> float:
        """1 when the reply settles on any letter."""
        return float(bool(letter_in(rollout.completion_text)))
