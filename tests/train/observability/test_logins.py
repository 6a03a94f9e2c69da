"""Logins of trackers: what is said before a run is what the libraries find in it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wandb
from wandb.errors import UsageError, term
from wandb.sdk import wandb_setup
from wandb.sdk.lib import wbauth

from telescope_core.errors import ConfigError
from telescope_train.observability.trackers import wandb as tracker_module
from telescope_train.observability.trackers.logins import login_problem
from telescope_train.observability.trackers.tracker import TrackedRun
from telescope_train.observability.trackers.wandb import WeightsAndBiases
from telescope_train.plan.load import load_train_config
from telescope_train.plan.prepared import prepare

KEY = "a" * 40
NETRC = "machine {} login user password " + KEY
OWN = "https://wandb.lab.example:8443"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user who has never logged in anywhere, in an empty folder."""
    for name in os.environ:
        if name.startswith(("WANDB_", "TRACKIO_", "HF_")) or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield tmp_path
    wandb.teardown()


@pytest.mark.parametrize(
    ("environ", "files", "has_login"),
    [
        ({}, {}, False),
        ({"WANDB_API_KEY": KEY}, {}, True),
        ({"WANDB_API_KEY": ""}, {}, False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "token"}, {}, True),
        ({"WANDB_MODE": "offline"}, {}, True),
        ({"WANDB_MODE": "disabled"}, {}, True),
        ({"WANDB_MODE": "online"}, {}, False),
        ({}, {".netrc": NETRC.format("api.wandb.ai")}, True),
        ({}, {"_netrc": NETRC.format("api.wandb.ai")}, True),
        ({}, {".netrc": NETRC.format("huggingface.co")}, False),
        ({}, {".netrc": "machine"}, False),
        ({"NETRC": "~/mine"}, {"mine": NETRC.format("api.wandb.ai")}, True),
        ({"NETRC": "~/mine"}, {".netrc": NETRC.format("api.wandb.ai")}, False),
        ({"WANDB_BASE_URL": OWN}, {".netrc": NETRC.format("api.wandb.ai")}, False),
        ({"WANDB_BASE_URL": OWN}, {".netrc": NETRC.format("wandb.lab.example:8443")}, True),
        (
            {},
            {
                ".config/wandb/settings": f"[default]\nbase_url = {OWN}\n",
                ".netrc": NETRC.format("api.wandb.ai"),
            },
            False,
        ),
        ({}, {".config/wandb/settings": f"[default]\napi_key = {KEY}\n"}, True),
        ({}, {"wandb/settings": "[default]\nmode = offline\n"}, True),
        ({"WANDB_DIR": "own"}, {"own/wandb/settings": "[default]\nmode = offline\n"}, False),
        ({"WANDB_CONFIG_DIR": "own"}, {"own/settings": f"[default]\napi_key = {KEY}\n"}, True),
        ({"WANDB_MODE": "online"}, {"wandb/settings": "[default]\nmode = offline\n"}, False),
        ({}, {"wandb/settings": "no section"}, False),
    ],
)
def test_a_login_is_found_where_wandb_finds_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, environ, files, has_login
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    settings = wandb_setup.singleton().settings
    found = settings.mode in ("offline", "disabled") or wbauth.authenticate_session(
        host=settings.base_url, source="test", prompt=False, update_session=False
    )
    assert bool(found) is has_login
    assert (login_problem("wandb") is None) is has_login


def test_a_space_of_trackio_needs_a_login_of_hugging_face(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """trackio itself would begin a login in the tracker's thread."""
    token: list[str | None] = [None]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token[0])
    assert login_problem("trackio") is None, "it stays on this machine"
    monkeypatch.setenv("TRACKIO_SPACE_ID", "lab/runs")
    assert "HF_TOKEN" in (login_problem("trackio") or "")
    token[0] = "hf_x"
    assert login_problem("trackio") is None
    assert login_problem("tensorboard") is None


def test_the_plan_says_that_a_login_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch):
    flags = ["--name", "run", "--model", str(home / "none"), "--number_of_steps", "1"]
    flags += ["--environments", '[{"name": "maze"}]']
    config = load_train_config([], [*flags, "--use_wandb"])
    assert [one for one in prepare(config).problems if "wandb login" in one]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not [one for one in prepare(config).problems if "wandb" in one]


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard streams that W&B takes for those of a person."""
    for name in ("_sys_stdin_isatty", "_sys_stderr_isatty"):
        monkeypatch.setattr(term, name, lambda: True)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.slow
@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize(
    ("finds", "error"), [(login_problem, ConfigError), (lambda name: None, UsageError)]
)
def test_nobody_is_asked_for_a_login_in_a_run(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    finds: Callable[[str], str | None],
    error: type[Exception],
):
    monkeypatch.setattr(tracker_module, "login_problem", finds)
    options = {"wandb_project": "telescope", "wandb_tags": ()}
    run = TrackedRun(name="run", folder=home, config={}, first_step=1, options=options)
    with pytest.raises(error):
        WeightsAndBiases().begin(run)
