"""What `telescope doctor` advises can be set."""

import ast
import re
from pathlib import Path

from telescope_core.diagnosis import rules
from telescope_train.config import schema

NOT_SETTINGS = {
    *("reward_min", "reward_max", "eval_points", "to_thread"),
    *("requires_grad", "zero_grad"),
}
"""Attributes of an environment, a tensor and an optimizer, a file, and a function of Python."""


def test_every_setting_that_is_advised_is_there():
    sections = [one for one in vars(schema).values() if hasattr(one, "model_fields")]
    known = {name for section in sections for name in section.model_fields}
    trees = [ast.parse(one.read_text()) for one in Path(rules.__file__).parent.glob("*.py")]
    parts = [one for tree in trees for one in ast.walk(tree)]
    texts = [one.value for one in parts if isinstance(one, ast.Constant)]
    sentences = [text for text in texts if isinstance(text, str) and " " in text]
    named = {
        word
        for text in sentences
        for word in re.findall(r"(?<![\w/])[a-z]+(?:_[a-z0-9]+)+(?![\w/])", text)
    }
    metrics = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    missing = {word for word in named - known - NOT_SETTINGS if f"`{word}`" not in metrics}
    assert named & known
    assert missing == set()
