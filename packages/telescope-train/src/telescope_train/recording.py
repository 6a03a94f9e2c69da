"""Open the records of a run: its logs, its rows, and trackers and exports."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from telescope_core.base.secret_names import secret_values
from telescope_core.records import RunFolder
from telescope_core.records.logs import Logs, telling_failure
from telescope_train.config.eval_folders import parts_of_folder_name
from telescope_train.config.schema import TrainConfig
from telescope_train.observability.prometheus import PrometheusEndpoint
from telescope_train.observability.recording import Recording, RecordingSettings, recording
from telescope_train.observability.terminal import LiveView
from telescope_train.observability.trackers.log_uploads import LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker, names_in_use
from telescope_train.plan.prepared import Prepared

_LOGGER = logging.getLogger(__name__)


def run_logs(config: TrainConfig, folder: RunFolder) -> Logs:
    """Return the settings of the logs of the run's processes."""
    return Logs(folder=folder.logs_path.absolute(), is_debug=config.writes_debug)


def run_secrets(prepared: Prepared) -> set[str]:
    """Return the secrets of environments and settings, which must not leave this process."""
    declared = {name for names in prepared.environments.secrets.values() for name in names}
    values = {os.environ.get(name, "") for name in declared} - {""}
    settings = prepared.config.model_dump(mode="json")
    return values | secret_values(settings) | secret_values(os.environ)


@asynccontextmanager
async def open_recording(
    prepared: Prepared, folder: RunFolder, view: LiveView, *, reached_at: str, secret: str
) -> AsyncIterator[Recording]:
    """Open the records of the run besides its rows.

    `reached_at`: the address of this machine for servers, who show `secret` where others reach it.
    """
    inference, observability = prepared.config.inference, prepared.config.observability
    trackers = names_in_use(observability)
    shown = None
    if observability.prometheus_port is not None:
        names = {one.name for one in prepared.config.environments}
        names |= {one.name for one in prepared.config.evals.evals}
        shown = PrometheusEndpoint(
            observability.prometheus_host,
            observability.prometheus_port,
            environments=sorted(names),
        )
    settings = RecordingSettings(
        folder=folder.path,
        run=prepared.config.run.name,
        model=prepared.config.model.model,
        parts_of_eval=partial(
            parts_of_folder_name,
            environments=[one.name for one in prepared.config.evals.evals],
        ),
        receives_traces=inference.enable_vllm_tracing,
        receiver_host=reached_at,
        receiver_secret=secret,
        receiver_port=inference.otlp_receiver_port,
        export_to=observability.otlp_export_endpoint,
        prometheus=shown,
        trackers={name: load_tracker(name) for name in trackers},
        uploads={"wandb": _uploads(prepared, folder)} if observability.use_wandb else {},
        tracked=TrackedRun(
            name=prepared.config.run.name,
            folder=folder.path.absolute(),
            config=prepared.config.model_dump(mode="json"),
            first_step=1 + (prepared.resume.checkpoint.step if prepared.resume else 0),
            options={
                "wandb_project": observability.wandb_project,
                "wandb_tags": observability.wandb_tags,
            },
        ),
    )
    async with recording(settings, folder.events_path, warn=view.warn) as opened:
        if shown is not None:
            view.note(f"metrics for Prometheus: {shown.address}")
        # Inside, so that trackers that take the logs have it in them.
        with telling_failure(_LOGGER, "the run"):
            yield opened


def _uploads(prepared: Prepared, folder: RunFolder) -> LogUploads:
    section = prepared.config.observability
    return LogUploads(
        folder=folder.logs_path.absolute(),
        has_logs=section.wandb_upload_logs,
        has_debug=section.wandb_upload_logs_detailed,
        has_output=section.wandb_upload_logs_stdout,
        secrets=frozenset(run_secrets(prepared)),
    )
