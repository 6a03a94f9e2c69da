"""`EvalRequest`: one environment and one model of a `telescope eval` command, checked."""

import hashlib
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from telescope_cli.eval.model import model_folder, require_fitting
from telescope_cli.eval.selection import Selection, resolve
from telescope_cli.eval.view import tell
from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.interruptible import run
from telescope_core.base.open_files import require_open
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.secret_names import secret_values, secrets_line
from telescope_core.base.types import EnvironmentDescription, JsonValue
from telescope_core.chat.client import ApiKey
from telescope_core.environments.author_errors import contained
from telescope_core.evals import EvalSettings
from telescope_core.processes.settings import ProcessSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """One environment and one model to be evaluated."""

    environment: str
    environment_settings: dict[str, Any]
    model: str | None
    """Model folder, or name of a served model; None = the only model the endpoint serves."""
    base_url: str | None
    """URL of the endpoint; None = `model` is a folder, which is served for this eval."""
    chat_template: str | None
    """Text that replaces the chat template of a model folder; None = its own."""
    api_key: ApiKey
    settings: EvalSettings
    selection: Selection
    """The selected examples; once checked, `settings` holds their positions in the environment."""
    processes: ProcessSettings
    """Place of the environment's processes, which does not affect the results."""
    record: EnvironmentRecord
    """Identity of the environment's code."""
    secrets: tuple[str, ...] = ()
    """Names of the variables that its workers may read; once checked, those that were shown."""
    has_group_rewards: bool = False
    """Once checked, whether rewards need all rollouts of an example."""

    @property
    def name(self) -> str:
        """The environment and the model, for people."""
        return f"{self.environment} with {self.model}" if self.model else self.environment

    @property
    def template_digest(self) -> str:
        """Digest of the given chat template; empty if none was given."""
        text = self.chat_template
        return hashlib.sha256(text.encode()).hexdigest()[:12] if text is not None else ""

    def manifest(self) -> dict[str, JsonValue]:
        """Return everything that affects the results."""
        code = self.record
        return {
            "environment": self.environment,
            "environment_code": {
                "id": code.id,
                "version": code.version,
                "wheel_sha256": code.wheel_sha256,
                "lock_digest": code.lock_digest,
            },
            "environment_files": dict(code.files),
            "model_files": self._model_files(),
            "env": self.environment_settings,
            "model": self.model,
            "base_url": self.base_url,
            # As in evals that were begun before there was such an option.
            "chat_template": self.template_digest or None,
            **asdict(self.settings),
        }

    def hidden_values(self) -> set[str]:
        """Return all values that may be secrets, of which nothing may be written."""
        given = {"env": self.environment_settings, "base_url": self.base_url}
        read = {os.environ.get(name, "") for name in self.secrets}
        values = {self.api_key.value, *read} - {""}
        return values | secret_values(given) | secret_values(os.environ)

    def _model_files(self) -> dict[str, JsonValue]:
        """Return the digests of the files of a model folder; none for an endpoint."""
        if self.base_url is not None or self.model is None or find_spec("telescope_train") is None:
            return {}
        from telescope_train.checkpoints.resume import inputs_of

        return {**inputs_of(self.model, chat_template=None)}


class Opened(NamedTuple):
    """An open environment, and its request with what is known from it."""

    request: EvalRequest
    environment: EnvironmentClient
    description: EnvironmentDescription


def checked(requests: Sequence[EvalRequest]) -> list[EvalRequest]:
    """Return the requests with their examples resolved; raises before anything is written."""
    for model in sorted({one.model or "" for one in requests if one.base_url is None}):
        require_fitting(model_folder(model or None))
    with contained():
        return run(_checked(requests))


async def _checked(requests: Sequence[EvalRequest]) -> list[EvalRequest]:
    found: dict[str, EvalRequest] = {}
    endpoints: set[str | None] = set()
    for request in requests:
        if request.environment not in found:
            async with opened(request) as one:
                found[request.environment] = one.request
        if request.base_url is not None and request.model not in endpoints:
            endpoints.add(request.model)
            await _check_endpoint(request, request.base_url)
    return [
        replace(
            request,
            settings=first.settings,
            secrets=first.secrets,
            has_group_rewards=first.has_group_rewards,
        )
        for request in requests
        for first in (found[request.environment],)
    ]


@asynccontextmanager
async def opened(request: EvalRequest) -> AsyncGenerator[Opened]:
    """Open the environment, so that problems with it or its examples are reported first."""
    from telescope_core.open import open_environment

    environment = open_environment(
        request.environment, request.environment_settings, request.processes
    )
    environment.tell_secrets(
        lambda names: tell(secrets_line(request.environment, names, os.environ))
    )
    try:
        description = await environment.describe()
        settings = await resolve(
            request.selection, request.settings, environment, description, tell=tell
        )
        require_open(min(settings.concurrency, settings.num_examples * settings.rollouts))
        known = replace(
            request,
            settings=settings,
            secrets=environment.secrets,
            has_group_rewards=description.has_group_rewards,
        )
        yield Opened(known, environment, description)
    finally:
        await environment.close()


async def _check_endpoint(request: EvalRequest, base_url: str) -> None:
    from telescope_core.chat.client import ChatClient
    from telescope_core.chat.http import RequestLimits

    limits = RequestLimits(retry_budget_s=3.0)
    client = ChatClient(base_url, request.model, api_key=request.api_key, limits=limits)
    try:
        if (note := await client.check()) is not None:
            tell(note, "yellow")
    finally:
        await client.close()
