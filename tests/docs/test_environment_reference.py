"""The reference of environments names everything an author may use."""

import re
from pathlib import Path

import telescope_core.environments
from telescope_core import parsers
from telescope_core.dataset_source import DatasetSpec
from telescope_core.environments import Environment, Episode
from telescope_core.models.helper_models import HelperModelConfig
from telescope_core.user_simulator import UserSimulatorConfig

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "environments.md").read_text()
NAMED = set(re.findall(r"[A-Za-z_]+", " ".join(re.findall(r"`([^`]+)`", TEXT))))
OWN = {"caller", "fetcher", "find_stop", "hooks", "score_functions", "check_range", "score"}
OWN |= {
    "offers_tools",
    "sends_system",
    "goes_on",
    "first_messages",
    "initial_messages",
    "opening",
    "from_settings",
    "forget_requests",
    "has_given_endpoint",
    "require_built",
    "new_state",
}
"""Of Telescope itself: what calls an author's methods."""


def test_classes_and_decorators():
    assert set(telescope_core.environments.__all__) - NAMED == set()


def test_methods_and_attributes():
    public = {name for name in vars(Environment) if not name.startswith("_")}
    assert public - OWN - NAMED == set()
    methods = {name for name in vars(Episode) if not name.startswith("_")}
    assert methods - OWN - NAMED == set()


def test_parsers_and_settings():
    assert set(parsers.__all__) - NAMED == set()
    assert {*HelperModelConfig.model_fields, *UserSimulatorConfig.model_fields} - NAMED == set()
    assert {"path", "revision", "prompt_field", "answer_field"} <= set(DatasetSpec.__slots__)


def test_nothing_is_named_that_is_not_there():
    claimed = set(re.findall(r"^\| `([a-z_]+)\(self", TEXT, re.MULTILINE))
    assert {name for name in claimed if name != "env_response"} <= set(dir(Environment))
