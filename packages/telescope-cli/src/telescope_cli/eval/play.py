"""Play the evals of one command, model by model, and record each in its own folder."""

import re
import socket
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count, groupby
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from telescope_cli.eval.model import model_folder, serve_folder
from telescope_cli.eval.request import EvalRequest
from telescope_cli.eval.view import EvalProgress, print_unreadable
from telescope_core.base.errors import (
    EndpointError,
    NoRoomError,
    ProcessDiedError,
    TelescopeError,
    TooManyFailedError,
)
from telescope_core.base.folders import make_folder
from telescope_core.base.interruptible import run
from telescope_core.base.interrupts import Interrupted, held, raise_if_asked
from telescope_core.base.open_files import advice_for
from telescope_core.chat.client import ApiKey
from telescope_core.environments.author_errors import contained
from telescope_core.evals import EvalFolder, EvalResult, EvalStoppedError, run_eval
from telescope_core.processes.settings import split_address
from telescope_core.records import RunState
from telescope_core.reports import write_eval_report


class _Endpoint(NamedTuple):
    """The endpoint of an eval."""

    base_url: str
    model: str | None
    """Name of the model there; None = the only one."""
    api_key: ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """The outcome of one request: a result, or an error; both if it was stopped."""

    request: EvalRequest
    folder: EvalFolder
    result: EvalResult | None = None
    error: TelescopeError | None = None


def evaluate(
    requests: Sequence[EvalRequest], *, output: Path | None, resume: bool
) -> list[EvalOutcome]:
    """Play all `requests`; with several of them, an error of one does not stop the others."""
    outcomes: list[EvalOutcome] = []
    kept = "Finished rollouts"
    if any(one.has_group_rewards for one in requests):
        kept += " (with group rewards, examples with all of their rollouts)"
    with ExitStack() as stack:
        with held():
            root, folders = _open_folders(requests, output, resume=resume)
            again = f"repeat the command with --output {quote(str(root))} --resume"
            stack.enter_context(
                telling(
                    f"{kept} are in {root}; {again} to continue",
                    folders,
                    otherwise=f"No finished rollout is recorded; {again}",
                )
            )
            for folder in folders:
                stack.enter_context(recorded(folder))
        raise_if_asked()
        pairs = list(zip(requests, folders, strict=True))
        for _, group in groupby(pairs, key=lambda pair: pair[0].model):
            outcomes += _evaluate_model(list(group), stop_at_error=len(requests) == 1)
    return outcomes


def _evaluate_model(
    pairs: Sequence[tuple[EvalRequest, EvalFolder]], *, stop_at_error: bool
) -> list[EvalOutcome]:
    """Play the evals of one model, which is served once for all of them."""
    outcomes: list[EvalOutcome] = []
    request, folder = pairs[0]
    try:
        with _endpoint(request, folder) as endpoint:
            for one, place in pairs:
                outcomes.append(_evaluate_one(one, place, endpoint))
                error, result = outcomes[-1].error, outcomes[-1].result
                if stop_at_error and error is not None and result is None:
                    raise error
    except TelescopeError as error:
        if stop_at_error:
            raise
        for one, place in pairs[len(outcomes) :]:
            place.fail(str(error))
            outcomes.append(EvalOutcome(request=one, folder=place, error=error))
    return outcomes


def _evaluate_one(request: EvalRequest, folder: EvalFolder, endpoint: _Endpoint) -> EvalOutcome:
    try:
        with contained():
            result = run(_play(request, folder, endpoint))
    except EvalStoppedError as error:
        return _stopped(request, folder, error)
    except TelescopeError as error:
        folder.fail(str(error))
        return EvalOutcome(request=request, folder=folder, error=error)
    with held():
        folder.finish(result)
        write_eval_report(folder)
    # As it was written, without the values of secrets that names of failures may hold.
    return EvalOutcome(request=request, folder=folder, result=folder.result())


def _stopped(request: EvalRequest, folder: EvalFolder, stopped: EvalStoppedError) -> EvalOutcome:
    """Write the result of an eval that failed too often to go on."""
    with held():
        folder.finish(stopped.result, stopped=str(stopped))
        write_eval_report(folder)
    error = TooManyFailedError(
        f"{request.name}: {stopped}. The results so far are in {folder.path}; repeat the command "
        f"with --output {quote(str(folder.path))} --resume to play the failed and the missing "
        "rollouts, or also with --max-failed 1 to go on however many fail"
    )
    return EvalOutcome(request=request, folder=folder, result=folder.result(), error=error)


async def _play(request: EvalRequest, folder: EvalFolder, endpoint: _Endpoint) -> EvalResult:
    from telescope_core.chat.client import ChatClient
    from telescope_core.chat.http import RequestLimits
    from telescope_core.chat.trouble import showing_troubles
    from telescope_core.gateway import forwarding, recording
    from telescope_core.open import open_environment
    from telescope_core.processes import EnvironmentPool

    settings = request.settings
    done, problems = folder.read(pictures_of=())
    print_unreadable(problems)
    limits = RequestLimits(request_timeout_s=settings.deadline_s)
    client = ChatClient(endpoint.base_url, endpoint.model, api_key=endpoint.api_key, limits=limits)
    processes = replace(request.processes, log_folder=folder.path / "logs")
    environment = open_environment(request.environment, request.environment_settings, processes)

    def with_record(result: EvalResult) -> EvalResult:
        return replace(
            result,
            environment_record=request.record,
            environment_settings=request.environment_settings,
            chat_template=request.template_digest,
        )

    try:
        host = host_seen_by(request.processes.addresses)
        whole_groups = (await environment.describe()).has_group_rewards
        progress = EvalProgress(settings, done=done, whole_groups=whole_groups)
        with progress.bar, showing_troubles(progress.note):

            def record(row: Any) -> None:
                folder.append(row)
                progress.update(row)

            if isinstance(environment, EnvironmentPool):
                environment.on_replaced = lambda why: progress.note(f"a worker is replaced: {why}")
                if not request.processes.addresses:
                    environment.agreement.settle(request.secrets)
            async with forwarding(client, host=host) as policies:
                result = await run_eval(
                    recording(environment, note=progress.note),
                    policies,
                    settings,
                    model=request.model or await client.model(),
                    on_rollout=record,
                    on_attempt=folder.append_attempt,
                    done=done,
                )
            if result.num_failed:
                client.require_access()
            return with_record(result)
    except EvalStoppedError as error:
        client.require_access()
        raise EvalStoppedError(str(error), with_record(error.result)) from None
    finally:
        await environment.close()
        await client.close()


@contextmanager
def _endpoint(request: EvalRequest, folder: EvalFolder) -> Generator[_Endpoint, None, None]:
    """Yield the endpoint of the model; without a URL, start a server for it."""
    if request.base_url is not None:
        yield _Endpoint(request.base_url, request.model, request.api_key)
        return
    template = folder.path / "chat_template.jinja"
    if request.chat_template is not None:
        template.write_text(request.chat_template, encoding="utf-8")
    with serve_folder(
        model_folder(request.model),
        log_path=folder.path / "server.log",
        chat_template=None if request.chat_template is None else template,
    ) as served:
        yield _Endpoint(served.base_url, served.model, ApiKey(served.api_key))


def host_seen_by(addresses: Sequence[str]) -> str:
    """Return the address of this machine that the workers at `addresses` can reach.

    Programs of an environment that runs elsewhere send their requests to it.
    """
    if not addresses:
        return "127.0.0.1"
    found = socket.getaddrinfo(*split_address(addresses[0]), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # Nothing is sent: the operating system chooses the interface that leads there.
        probe.connect(address)
        return str(probe.getsockname()[0])


def folders_of(
    requests: Sequence[EvalRequest], output: Path | None, root: Path, *, is_single: bool
) -> list[Path]:
    """Return the folder of each eval: in `root`, unless it is the only one of the command."""
    if is_single and requests:
        return [output or root.with_name(f"{_plain_name(requests[0].environment)}-{root.name}")]
    return _distinct([root / _folder_name(request) for request in requests])


def usual_root(stamp: str) -> Path:
    """Return the folder of a command without `--output`, which began at `stamp`."""
    return Path("runs", "evals", stamp)


def _open_folders(
    requests: Sequence[EvalRequest], output: Path | None, *, resume: bool
) -> tuple[Path, list[EvalFolder]]:
    """Return the folder of the whole command, and the folder of each eval."""
    if len(requests) == 1:
        (path,) = folders_of(requests, output, usual_root(_stamp()), is_single=True)
        folder = _open_folder(requests[0], path, output, resume=resume)
        return folder.path, [folder]
    root = output or _new_root()
    paths = folders_of(requests, output, root, is_single=False)
    return root, [
        _open_folder(one, path, path, resume=resume and EvalFolder.holds_eval(path))
        for one, path in zip(requests, paths, strict=True)
    ]


def _open_folder(
    request: EvalRequest, path: Path, output: Path | None, *, resume: bool
) -> EvalFolder:
    start = EvalFolder.create if output is not None else EvalFolder.create_beside
    folder = (EvalFolder.resume if resume else start)(path, manifest=request.manifest())
    folder.hide = request.hidden_values()
    return folder


def _new_root() -> Path:
    """Return a new folder for several evals."""
    base = usual_root(_stamp())
    for number in count(1):
        root = base if number == 1 else base.with_name(f"{base.name}-{number}")
        make_folder(root.parent)
        with suppress(FileExistsError):
            root.mkdir()
            return root
    raise AssertionError("there is always another number")


def _folder_name(request: EvalRequest) -> str:
    model = _plain_name(Path(request.model).name) if request.model else ""
    return "-".join(part for part in (_plain_name(request.environment), model) if part)


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, with a number added to those that already exist."""
    found: list[Path] = []
    for path in paths:
        number, free = 1, path
        while free in found:
            number += 1
            free = path.with_name(f"{path.name}-{number}")
        found.append(free)
    return found


def _plain_name(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _stamp() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


@contextmanager
def recorded(folder: EvalFolder) -> Generator[None, None, None]:
    """Record in the folder why an eval that was begun, or was waiting, did not finish."""
    try:
        yield
    except Interrupted as error:
        with held(), suppress(OSError, NoRoomError):
            folder.end_unless_ended(RunState.INTERRUPTED, f"interrupted by {error.number.name}")
        raise
    except Exception as error:
        # A full disk may be the failure: it must not be hidden by another one.
        with held(), suppress(OSError, NoRoomError):
            why = advice_for(error)
            reason = f"{type(error).__name__}: {error}{why and f'; {why}'}"
            folder.end_unless_ended(RunState.FAILED, reason)
        raise


@contextmanager
def telling(
    kept: str, folders: Sequence[EvalFolder] = (), *, otherwise: str = ""
) -> Generator[None, None, None]:
    """After a signal or on a full disk, say what is `kept` and how to go on.

    `otherwise`: what is said in its place if none of `folders` has a rollout. Of an endpoint or a
    process that is gone, nothing is said then.
    """
    try:
        yield
    except Interrupted as error:
        said = kept if _have_rollouts(folders) else otherwise or kept
        raise Interrupted(error.number, f"{error}. {said}") from error
    except NoRoomError as error:
        said = kept if _have_rollouts(folders) else otherwise or kept
        raise NoRoomError(f"{error}. {said}") from error
    except (EndpointError, ProcessDiedError) as error:
        if _have_rollouts(folders):
            error.args = (f"{error}. {kept}",)
        raise


def _have_rollouts(folders: Sequence[EvalFolder]) -> bool:
    return any((one.path / "rollouts.jsonl").exists() for one in folders)
