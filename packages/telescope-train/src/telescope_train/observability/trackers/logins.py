"""Logins that trackers need: their libraries would ask a person for one in the middle of a run.

Reads what each library reads, and asks no server, so a login that is there may still be refused.
"""

import configparser
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")
"""Hosts of W&B itself, of which versions of its library take different ones."""


def login_problem(tracker: str) -> str | None:
    """Return which login `tracker` lacks and what to do; None = it has one, or needs none."""
    if tracker == "wandb":
        settings = _wandb_settings()
        host = os.environ.get("WANDB_BASE_URL") or settings.get("base_url")
        if _has_wandb_login(settings, host):
            return None
        return (
            f"there is no login for Weights & Biases{f' at {host}' if host else ''} here, so it "
            "would get nothing: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to "
            "keep what it would get in the run folder"
        )
    if tracker == "trackio" and (space := os.environ.get("TRACKIO_SPACE_ID")):
        from huggingface_hub import get_token

        if get_token() is None:
            return (
                f"TRACKIO_SPACE_ID is {space!r}, and there is no login for Hugging Face here: run "
                "`hf auth login`, or set HF_TOKEN to a token that may write"
            )
    return None


def _has_wandb_login(settings: dict[str, str], host: str | None) -> bool:
    """Return whether W&B needs no login, or may find one for `host`; None = its own."""
    if os.environ.get("WANDB_MODE", settings.get("mode")) in ("offline", "dryrun", "disabled"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if "api_key" in settings or "identity_token_file" in settings:
        return True
    hosts = set(_WANDB_HOSTS)
    if host and (name := urlsplit(host).hostname) not in hosts:
        hosts = {urlsplit(host).netloc, name or ""}
    files = ["~/.netrc", "~/_netrc"]
    files = [os.path.expanduser(os.environ.get("NETRC") or one) for one in files]
    with suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(next((one for one in files if Path(one).exists()), files[0]))
        found = [known.authenticators(one) for one in hosts]
        return any(login is not None and login[2] for login in found)
    return False


def _wandb_settings() -> dict[str, str]:
    """Return what W&B's files of settings say: those of the user, then those of the folder."""
    own = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    # Read before the environment is, so that WANDB_DIR does not count.
    places = (Path(os.path.expanduser(own)), Path("wandb"), Path(".wandb"))
    parser = configparser.ConfigParser(interpolation=None)
    for place in places:
        with suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(place / "settings")
    return dict(parser["default"]) if parser.has_section("default") else {}
