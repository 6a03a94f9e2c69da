"""What `telescope eval --dry-run` shows: what would be played, with the first prompt of each.

The environments are opened, and the first example is begun up to its first request, which no model
gets. An endpoint is not asked, and nothing is written.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from telescope_cli.eval.files import Given
from telescope_cli.eval.model import model_folder, require_fitting, require_server
from telescope_cli.eval.play import folders_of, usual_root
from telescope_cli.eval.request import EvalRequest, Opened, opened
from telescope_core.base.errors import ConfigError, EndpointError, TelescopeError
from telescope_core.base.interruptible import run
from telescope_core.base.messages import tool_name
from telescope_core.base.number_text import counted
from telescope_core.base.protocols import PlayRequest
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.secret_names import secrets_text, which_are_set, without_secrets
from telescope_core.base.terminal import escaped, quoted, row, wrapped
from telescope_core.base.types import EnvironmentDescription, JsonValue
from telescope_core.environments.author_errors import contained
from telescope_core.environments.episode import NO_ENDPOINT
from telescope_core.evals import EvalFolder, EvalSettings
from telescope_core.evals.settings import as_played

_NO_MODEL = EndpointError("this is a dry run, in which no model is asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """The first request of the first example."""

    example: str
    """Id of the example."""
    messages: tuple[Mapping[str, JsonValue], ...]
    tools: tuple[str, ...]
    """Names of the tools that it offers."""
    of_program: bool
    """Whether a program of the environment writes the requests; `messages` are its task then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEval:
    """One environment, with every model."""

    environment: str
    code: str
    """Id, version, place and digest of its code."""
    env: Mapping[str, JsonValue]
    """Settings of the environment itself, without values of secrets."""
    settings: EvalSettings
    description: EnvironmentDescription
    max_requests: int | None
    """Most requests to each model, but for those that are repeated; None = not known."""
    origins: Mapping[str, str]
    """Option, or entry of a table such as `extra_body.top_k` -> the settings file that has it, or
    `command line`; others are at their default."""
    secrets: Mapping[str, bool]
    """Each variable that its code may read, and whether it is set."""
    first: FirstPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """All content of a dry run."""

    models: tuple[str | None, ...]
    """Folders, or names at the endpoint; None = the only one that it serves."""
    base_url: str | None
    """URL of the endpoint, which was not asked; None = models are served for this eval."""
    evals: tuple[PlannedEval, ...]
    folders: tuple[str, ...]
    """The folder of each eval, model by model; DATE-TIME is that of the beginning."""
    problems: tuple[str, ...]
    """Reasons why it could not be played; empty if it could."""


def make_plan(
    requests: Sequence[EvalRequest],
    each: Mapping[str, Given],
    problems: Sequence[str],
    *,
    output: Path | None,
    resume: bool,
) -> EvalPlan:
    """Return what `requests` would play, and after `problems` those that are found on the way.

    `each`: environment -> its options, which say where they were set.
    """
    shared = next(iter(each.values())).values
    models: tuple[str | None, ...] = (*dict.fromkeys(shared["model"]),) or (None,)
    base_url: str | None = shared["base_url"]
    found = [*problems]
    for model in models if base_url is None else ():
        try:
            require_fitting(model_folder(model))
            require_server()
        except TelescopeError as error:
            found.append(str(error))
    evals: list[PlannedEval] = []
    known: dict[str, EvalRequest] = {}
    for request in {one.environment: one for one in requests}.values():
        try:
            with contained():
                known[request.environment], planned = run(
                    _planned(request, each[request.environment].origins)
                )
        except TelescopeError as error:
            told, name = str(error), request.environment
            found.append(told if told.startswith(name) else f"{name}: {told}")
        else:
            evals.append(planned)
    is_single = len(each) == len(models) == 1
    root = output or usual_root("DATE-TIME")
    folders = folders_of(requests, output, root, is_single=is_single)
    found += _folder_problems(requests, known, folders, output=output, resume=resume)
    return EvalPlan(
        models=models,
        base_url=without_secrets({"base_url": base_url})["base_url"],
        evals=tuple(evals),
        folders=tuple(map(str, folders)),
        problems=tuple(dict.fromkeys(found)),
    )


def _folder_problems(
    requests: Sequence[EvalRequest],
    known: Mapping[str, EvalRequest],
    folders: Sequence[Path],
    *,
    output: Path | None,
    resume: bool,
) -> Iterator[str]:
    for request, path in zip(requests, folders, strict=True):
        whole = known.get(request.environment)
        is_resumed = resume and (path == output or EvalFolder.holds_eval(path))
        try:
            if is_resumed and whole is not None:
                manifest = replace(whole, model=request.model).manifest()
                EvalFolder.require_resumable(path, manifest=manifest)
            elif output is not None and not is_resumed:
                EvalFolder.require_free(path)
        except TelescopeError as error:
            yield str(error)


async def _planned(
    request: EvalRequest, origins: Mapping[str, str]
) -> tuple[EvalRequest, PlannedEval]:
    """Return the request with its examples, and what it would play; begins the first example."""
    async with opened(request) as found:
        about, settings = found.description, found.request.settings
        sampling = settings.sampling
        shown = replace(sampling, extra=without_secrets(sampling.extra))
        num_rollouts = settings.num_examples * settings.rollouts
        return found.request, PlannedEval(
            environment=request.environment,
            code=request.record.about,
            env=without_secrets(request.environment_settings),
            settings=replace(settings, sampling=shown),
            description=about,
            max_requests=None if about.max_turns is None else num_rollouts * about.max_turns,
            origins=origins,
            secrets=which_are_set(found.request.secrets, os.environ),
            first=await _first_prompt(found),
        )


async def _first_prompt(found: Opened) -> FirstPrompt:
    """Return the first request of the first example, which gets no answer.

    Raises ConfigError if the environment fails before it.
    """
    settings = found.request.settings
    asked = ScriptedClient([_NO_MODEL])
    request = PlayRequest(
        split=settings.split,
        example_index=settings.example_indices[0],
        group_id="dry-run",
        index=0,
        sampling=as_played(settings.sampling),
        deadline_s=settings.deadline_s,
    )
    rollout = await found.environment.play(request, asked.policy("dry-run"))
    # A program that uses the endpoint of the rollout finds that a script has none.
    of_program = not asked.requests and NO_ENDPOINT in (rollout.error or "")
    if not asked.requests and not of_program:
        raise ConfigError(
            f"example {rollout.example_id!r} fails before its first request: {rollout.error}"
        )
    messages = asked.requests[0] if asked.requests else rollout.messages
    return FirstPrompt(
        example=rollout.example_id,
        messages=tuple(
            {
                "role": one.role,
                "content": one.content,
                **({"images": len(one.images)} if one.images else {}),
            }
            for one in messages
        ),
        tools=tuple(map(tool_name, asked.tools[0])) if asked.tools else (),
        of_program=of_program,
    )


def render_plan(plan: EvalPlan) -> str:
    """Return the text that `telescope eval --dry-run` prints, at most 80 columns wide."""
    models = ", ".join(one or "the only model" for one in plan.models)
    at = f" at {plan.base_url}" if plan.base_url else ""
    num = sum(one.settings.num_examples * one.settings.rollouts for one in plan.evals)
    rollouts = counted(num * len(plan.models), "rollout")
    lines = wrapped(f"{rollouts} of {counted(len(plan.evals), 'environment')} by {models}{at}", "")
    for one in plan.evals:
        lines += ["", one.environment, *_rows(one)]
    if plan.folders:
        lines += ["", "written to", *(line for one in plan.folders for line in wrapped(one, "  "))]
    for one in plan.evals:
        lines += ["", *_first(one)]
    lines.append("")
    if plan.problems:
        lines.append("Nothing was played. The eval cannot be played:")
        lines += [line for problem in plan.problems for line in wrapped(problem, "- ")]
    elif plan.base_url:
        text = f"Nothing was played. The settings are in order; {plan.base_url} was not asked."
        lines += wrapped(text, "")
    else:
        lines.append("Nothing was played. The eval can be played on this machine.")
    return escaped("\n".join(line.rstrip() for line in lines))


def _rows(one: PlannedEval) -> Iterator[str]:
    settings, about = one.settings, one.description
    yield row("code", one.code)
    if one.env:
        given = (f"{name} = {json.dumps(value)}" for name, value in one.env.items())
        yield row("settings", ", ".join(given))
    if one.secrets:
        yield row("secrets", secrets_text(one.secrets))
    size = about.num_examples[settings.split]
    of = "an endless number" if size is None else f"{size:,}"
    yield row("examples", f"{settings.num_examples:,} of {of}, {settings.split} split")
    requests = "one request for each turn"
    if one.max_requests is not None:
        requests = f"at most {counted(one.max_requests, 'request')} to each model"
    each = f"{settings.num_examples * settings.rollouts:,}: {settings.rollouts} of each example"
    yield row("rollouts", f"{each}; {requests}")
    several, many = ([k for k in settings.ks if k > least] for least in (1, 2))
    measures = [f"pass@{k}" for k in settings.ks] + [f"pass^{k}" for k in several]
    votes = [f"maj@{k}" for k in many]
    told = f", and {', '.join(votes)} if rollouts tell their answers" if votes else ""
    yield row("measured", f"reward, {', '.join(measures)}{told}")
    parts = " + ".join(f"{weight:g} x {name}" for name, weight in about.reward_weights.items())
    ends = f"{about.reward_min:g} to {about.reward_max:g}"
    solved = f"{ends}, solved at {about.success_threshold:g} or more"
    yield row("reward", f"{parts}; {solved}" if parts else solved)
    if about.metrics:
        yield row("metrics", ", ".join(about.metrics))
    sampling = settings.sampling
    for name, value in {
        "temperature": sampling.temperature_text,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        **sampling.extra,
    }.items():
        if value not in (None, []):
            text = value if isinstance(value, str) else json.dumps(value)
            origin = one.origins.get(f"extra_body.{name}") or one.origins.get(name, "default")
            yield row(name, f"{text} ({origin})")


def _first(one: PlannedEval) -> Iterator[str]:
    what = "task of the first program" if one.first.of_program else "first prompt"
    yield from wrapped(f"{what} of {one.environment}: example {one.first.example}", "")
    for message in one.first.messages:
        images = f", and pictures: {message['images']}" if "images" in message else ""
        yield f"  {message['role']}{images}"
        yield from quoted(str(message["content"]), "  | ")
    if one.first.tools:
        yield from wrapped(f"tools: {', '.join(one.first.tools)}", "  ")
