"""What `telescope doctor` advises can be set."""

import ast
import re
from pathlib import Path

from telescope_core.diagnosis import rules
from telescope_core.settings.config import leaf_paths
from telescope_train.config import schema
from telescope_train.plan.checks.config import config_found

NOT_SETTINGS = {
    *("reward_min", "reward_max", "eval_points", "to_thread"),
    *("requires_grad", "zero_grad", "agent_timeout_s", "time_limit"),
}
"""Attributes and settings of an environment, of a tensor and an optimizer, a file, a function of
Python, and a tag of rollouts."""
ONLY_LOWERED = {"pass_at_k", "ppo_epochs"}
"""A setting above its default needs another one, but nothing advises to raise it."""
NAME = re.compile(r"(?<![\w/])[a-z]+(?:_[a-z0-9]+)+(?![\w/])")


def advice():
    """Return the sentences of the rules."""
    trees = [ast.parse(one.read_text()) for one in Path(rules.__file__).parent.glob("*.py")]
    parts = [one for tree in trees for one in ast.walk(tree)]
    texts = [one.value for one in parts if isinstance(one, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and " " in text]


def test_every_setting_that_is_advised_is_there():
    sections = [one for one in vars(schema).values() if hasattr(one, "model_fields")]
    known = {name for section in sections for name in section.model_fields}
    named = {word for text in advice() for word in NAME.findall(text)}
    metrics = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    missing = {word for word in named - known - NOT_SETTINGS if f"`{word}`" not in metrics}
    assert named & known
    assert missing == set()


def test_what_is_refused_alone_is_advised_with_what_it_needs():
    refused = {
        name: words_of_refusals(name, section=path[0])
        for name, path in leaf_paths(schema.TrainConfig).items()
        if len(path) == 2 and name not in ONLY_LOWERED
    }
    unmet = [
        (name, text)
        for text in advice()
        for name in NAME.findall(text)
        if refused.get(name) and not refused[name] & {*NAME.findall(text)}
    ]
    assert refused["overlong_buffer_tokens"]
    assert refused["clip_high"]
    assert unmet == []


def words_of_refusals(name, *, section):
    """Return the other names in what is said if this setting alone is above its default."""
    tables = {
        "run": {"name": "r", "number_of_steps": 100},
        "model": {"model": "m"},
        "environments": [{"name": "reverse"}],
    }
    default = getattr(getattr(schema.TrainConfig.model_validate(tables), section), name)
    raised = (0.5, 5000, True) if default is None else ()
    if isinstance(default, int | float):
        raised = (True,) if isinstance(default, bool) else (default + 1,)
    for value in raised:
        with_it = {**tables, section: {**tables.get(section, {}), name: value}}
        try:
            config = schema.TrainConfig.model_validate(with_it)
        except ValueError:
            continue
        said = " ".join(config_found(config).problems)
        return {*NAME.findall(said)} - {name}
    return set()
