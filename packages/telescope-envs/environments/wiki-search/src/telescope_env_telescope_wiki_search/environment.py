"""`WikiSearch`: questions of two steps over pages that are searched, opened and read."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    ListSource,
    Rollout,
    Split,
    metric,
    reward,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec, load_table
from telescope_core.errors import ConfigError
from telescope_core.examples import split_of
from telescope_core.parsers import xml_tag
from telescope_core.search import (
    LocalCorpus,
    Page,
    SearchBackend,
    SearchConfig,
    SearchEnvironment,
    is_same_answer,
)
from telescope_core.search.environment import opened
from telescope_env_telescope_wiki_search.questions import questions_of
from telescope_env_telescope_wiki_search.world import World, make_world

INSTRUCTION = (
    "Search the pages and read them, step by step. When you know the answer, write nothing but the "
    "answer between <answer> and </answer>."
)
EVAL_SHARE = 0.2


class WikiSearch(SearchEnvironment):
    """Answer questions of two steps by searching, opening and reading pages."""

    class Config(SearchConfig):
        """Which pages and which questions."""

        corpus: str = ""
        """A .jsonl, .json, .csv or .parquet file, a folder, or a dataset id on the Hub with pages;
        empty = the invented world of this environment."""
        corpus_revision: str = ""
        """Commit of a corpus on the Hub."""
        corpus_split: str = "train"
        title_field: str = "title"
        text_field: str = "text"
        questions: str = ""
        """Questions about a corpus of your own, in the same forms, with a question and an answer in
        each row."""
        questions_revision: str = ""
        """Commit of questions on the Hub."""
        instruction: str = INSTRUCTION
        """Follows the question."""
        seed: int = 0
        """The order of the questions; it moves none to the other split."""

        @model_validator(mode="after")
        def _both_or_neither(self) -> Self:
            if bool(self.corpus) != bool(self.questions):
                raise ValueError("expected corpus and questions together, or neither of them")
            return self

    config: Config
    success_threshold = 0.9

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        if self.dataset_revisions():
            self.network = "load"

    @cached_property
    def _world(self) -> World:
        return make_world()

    @property
    def _corpus(self) -> DatasetSpec:
        return DatasetSpec(path=self.config.corpus, revision=self.config.corpus_revision)

    @property
    def _questions(self) -> DatasetSpec:
        return DatasetSpec(
            path=self.config.questions,
            revision=self.config.questions_revision,
            eval_split="train",
        )

    def dataset_revisions(self) -> dict[str, str]:
        """Return the pinned revisions of a corpus and questions on the Hub."""
        if not self.config.corpus:
            return {}
        return {**self._corpus.revisions(), **self._questions.revisions()}

    def open_backend(self) -> SearchBackend:
        """Return an index of the pages, in memory."""
        return LocalCorpus(self._pages() if self.config.corpus else self._world.pages)

    def _pages(self) -> list[Page]:
        fields = (self.config.title_field, self.config.text_field)
        pages: list[Page] = []
        for number, row in enumerate(load_table(self._corpus, self.config.corpus_split), start=1):
            if not set(fields) <= set(row):
                raise ConfigError(
                    f"corpus {self.config.corpus!r} has no field {' or '.join(fields)}; set "
                    f"title_field and text_field to fields that it has: {', '.join(row)}"
                )
            title, text = (str(row[name]) for name in fields)
            pages.append(Page(address=f"page/{number}", title=title, text=text))
        return pages

    def examples(self, split: Split) -> ExampleSource:
        """Return the questions of `split`; a hash of the first page's title decides it."""
        if self.config.questions:
            return DatasetSource(self._questions, split)
        chosen = [
            _example(
                f"{one.text} {self.config.instruction}",
                answer=one.answer,
                info={
                    "question": one.text,
                    "steps": [one.first, one.second],
                    "sources": [self._world.address_of[name] for name in (one.first, one.second)],
                },
            )
            for one in questions_of(self._world)
            if split_of(f"wiki-search/{one.first}", eval_share=EVAL_SHARE) is split
        ]
        random.Random(f"wiki-search/{self.config.seed}/{split}").shuffle(chosen)
        return ListSource(chosen)

    def format_prompt(self, example: Example) -> Any:
        """Return the question; those of a table get the instruction here."""
        if example.info or not isinstance(example.prompt, str):
            return example.prompt
        return f"{example.prompt} {self.config.instruction}"

    def gold_answer(self, example: Example) -> Sequence[str]:
        """Return a search and a look at each of the two pages, then the answer."""
        replies: list[str] = []
        steps, sources = example.info.get("steps", ()), example.info.get("sources", ())
        assert isinstance(steps, list | tuple), f"steps of example {example.id}"
        assert isinstance(sources, list | tuple), f"sources of example {example.id}"
        for name, address in zip(steps, sources, strict=True):
            replies += [_call("search", query=str(name)), _call("open", address=str(address))]
        return [*replies, f"<answer>{example.answer}</answer>"]

    @reward(weight=0.9)
    def correct(self, rollout: Rollout, example: Example) -> float:
        """1 when the answer is right, up to case, articles and punctuation."""
        said = xml_tag(rollout.completion_text, "answer")
        return float(said is not None and is_same_answer(said, example.answer))

    @reward(weight=0.1)
    def evidence(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """The share of the two pages that were read; where they are not known, as `correct`."""
        sources = example.info.get("sources", ())
        if not isinstance(sources, list | tuple) or not sources:
            return self.correct(rollout, example)
        return len(set(map(str, sources)) & opened(episode)) / len(sources)

    @metric(low=0)
    def pages_read(self, episode: Episode[Any]) -> float:
        """How many pages were read."""
        return float(len(opened(episode)))


def _example(prompt: str, *, answer: str, info: Mapping[str, Any]) -> Example:
    digest = hashlib.sha256(str(info["question"]).encode()).hexdigest()[:16]
    return Example(id=digest, prompt=prompt, answer=answer, info=info)


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
