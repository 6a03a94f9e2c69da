"""What an environment of verifiers sets, and how it is made, without the package."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from telescope_adapters import verifiers
from telescope_adapters.settings import AdaptedConfig
from telescope_adapters.verifiers import ModelSettings, VerifiersEnvironment
from telescope_adapters.verifiers_tasks import _shown_scores
from telescope_core import Split
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import (
    ConfigError,
    EnvironmentLoadError,
    RewardError,
    UnknownNameError,
    UnplayableError,
)

NOTHING = {"n": 1, "extra_body": {}, "stop": None, "tool_choice": "auto", "logit_bias": None}


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        (NOTHING, []),
        ({"stop": "</a>"}, ["</a>"]),
        ({"stop": ("</a>", "</b>")}, ["</a>", "</b>"]),
        ({"stop": "</a>", "extra_body": {"stop": ["</b>"]}}, ["</b>"]),
    ],
)
def test_stop_texts_are_those_of_the_request(given, stop):
    assert ModelSettings("sums", NOTHING).stop_of(given) == stop


def test_what_is_not_used_is_named_once():
    said = []
    with showing_troubles(said.append):
        settings = ModelSettings("sums", {"temperature": 0.0, "extra_body": {"top_k": 5}})
        for limit in (8, 8, 9):
            settings.stop_of({"temperature": 0.0, "max_completion_tokens": limit}, max_tokens=8)
    assert [line.rpartition(": ")[2] for line in said] == [
        "temperature, top_k",
        "max_completion_tokens",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"include_stop_str_in_output": True}},
    ],
)
def test_what_allows_other_answers_is_refused(given):
    with pytest.raises(UnplayableError, match=next(iter(given.get("extra_body", given)))):
        ModelSettings("sums", given)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """A module of an environment that needs a level and opens a file for it, and its loading."""
    (tmp_path / "fit_env.py").write_text(
        "def load_environment(level):\n    return open(f'/no/such/{level}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str, **options):
        try:
            made = import_module(name.replace("-", "_")).load_environment(**options)
            made.env_id = made.env_id or name
            return made
        except ImportError as error:
            raise ValueError(f"could not import {name}") from error
        except Exception as error:
            raise RuntimeError(f"failed to load {name}: {error}") from error

    def loaded(options, name="fit-env"):
        made = VerifiersEnvironment.__new__(VerifiersEnvironment)
        made.config = AdaptedConfig(id=name, options=options)
        made._module = name.replace("-", "_")
        made._verifiers = SimpleNamespace(load_environment=load)
        return made._loaded()

    yield loaded
    sys.modules.pop("fit_env", None)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ("missing a required argument: 'level'", '\'{"options": {"level": VALUE}}\'')),
        ({"level": 1, "nope": 2}, ("unexpected keyword argument 'nope'", "it takes level")),
    ],
)
def test_options_that_load_environment_does_not_take_are_named(fit, options, parts):
    with pytest.raises(ConfigError, match="load_environment of fit-env") as caught:
        fit(options)
    assert all(part in str(caught.value) for part in parts)


def test_what_the_author_raises_is_told_with_its_place(fit):
    with pytest.raises(EnvironmentLoadError, match="raised FileNotFoundError") as caught:
        fit({"level": 3})
    assert "fit_env.py:2)" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return None", ("returned None, expected an environment",)),
        ("import os; os.environ['JUDGE']", ("'JUDGE'", "telescope env link --secret JUDGE")),
        ("raise ExceptionGroup('1 error', [OSError('no server')])", ("OSError: no server",)),
        ("raise ValueError('no JUDGE_KEY')", ("telescope env link --secret JUDGE_KEY",)),
        ("raise ValueError('CreateSandboxRequest: start_command')", ("'prime-sandboxes<0.2.37'",)),
    ],
)
def test_what_is_to_be_done_is_told(fit, tmp_path, body, parts):
    (tmp_path / "fit_env.py").write_text(f"def load_environment(level):\n    {body}\n")
    with pytest.raises(EnvironmentLoadError) as caught:
        fit({"level": 3})
    assert all(part in str(caught.value) for part in parts), caught.value


def opened(name: str = "fit-env", **env) -> VerifiersEnvironment:
    """Return an environment of verifiers around `env`, without the package."""
    made = VerifiersEnvironment.__new__(VerifiersEnvironment)
    made.config = AdaptedConfig(id=name)
    made._module, made._rows, made._has_clients = __name__, None, True
    made._settings = ModelSettings(name, {})
    nothing = {"build_dataset": list, "build_eval_dataset": list, "dataset": []}
    common = {"eval_dataset": None, "sampling_args": {}, "_run_rollout_state": None}
    made.env = SimpleNamespace(**{**nothing, **common, **env})
    made._client = lambda requests: requests
    return made


def lost():
    raise OSError("no rivers.jsonl; RIVERS_TOKEN is not set")


def test_datasets_that_cannot_be_built_or_have_no_rows_are_told_by_name():
    with pytest.raises(EnvironmentLoadError, match=r"of fit-env raised OSError: .*py:\d+\); .*--"):
        opened(build_dataset=lost).splits()
    with pytest.raises(EnvironmentLoadError, match="the dataset of fit-env has no rows"):
        opened().splits()


def test_an_example_that_cannot_be_played_is_named():
    seen = {"role": "user", "content": [{"type": "image_url"}]}
    rows = [{"example_id": 0, "prompt": "1+1="}, {"example_id": 7, "prompt": [seen]}]
    made = opened(dataset=rows, eval_dataset=[])
    with pytest.raises(EnvironmentLoadError, match=r"fit-env, example train-7: .*image_url"):
        made.examples(Split.TRAIN)


async def test_what_the_environment_raises_in_a_rollout_is_told_with_its_place():
    async def play(*_):
        lost()

    made = opened(dataset=[{"example_id": 0, "prompt": "1+1="}], eval_dataset=[])
    made.env._run_rollout_state = play
    episode = SimpleNamespace(
        example=SimpleNamespace(id="train-0"), sampling=SimpleNamespace(max_tokens=8)
    )
    with pytest.raises(OSError, match="no rivers") as caught:
        await made.play(episode)
    (note,) = caught.value.__notes__
    assert "test_verifiers_settings.py:" in note
    assert "--secret RIVERS_TOKEN" in note


def test_a_sandbox_without_its_key_says_which_variable_the_link_must_name():
    told = verifiers._reason(ValueError("Set PRIME_API_KEY environment variable."), __name__)
    assert "telescope env link --secret PRIME_API_KEY" in str(told)


def test_a_misspelt_name_is_told_as_names_are_linked(fit, monkeypatch):
    monkeypatch.setattr(verifiers, "packages_distributions", lambda: {"fit_env": ["fit-env"]})
    for typed, meant in {"fit-emv": "'fit-env'", "fit_emv": "'fit_env'"}.items():
        with pytest.raises(UnknownNameError, match=f"did you mean {meant}"):
            fit({}, typed)


@pytest.mark.parametrize("threshold", [0.0, 1.5, float("nan")])
def test_a_pass_threshold_outside_the_range_of_rewards_is_refused(threshold):
    made = SimpleNamespace(config=AdaptedConfig(id="sums"))
    assert VerifiersEnvironment._passing(made, 0.5) == 0.5
    with pytest.raises((ConfigError, RewardError), match="pass_threshold"):
        VerifiersEnvironment._passing(made, threshold)


def test_each_named_reward_of_a_taskset_is_shown():
    rewards = {"exact": 0.5, "unscored": None, "length": 0.25, "reward": 1.0}
    trace = SimpleNamespace(
        metrics={"length": 3.0, "unset": None},
        rewards={
            name: None if score is None else SimpleNamespace(score=score)
            for name, score in rewards.items()
        },
    )
    assert _shown_scores(trace, of="sums") == {
        "length": 3.0,
        "exact": 0.5,
        "length_score": 0.25,
        "reward_score": 1.0,
    }
    trace.rewards["exact"].score = float("inf")
    with pytest.raises(RewardError, match="reward exact of sums gave inf"):
        _shown_scores(trace, of="sums")
