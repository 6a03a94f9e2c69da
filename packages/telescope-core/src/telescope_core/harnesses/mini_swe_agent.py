"""The harness `mini-swe-agent`: one tool, bash, until it submits."""

import json
from collections.abc import Mapping
from typing import Any, cast

from telescope_core.harnesses.command import endpoint_variables
from telescope_core.harnesses.protocol import AGENT_FOLDER, AgentProgram, AgentTask

_SETTINGS = f"{AGENT_FOLDER}/settings.yaml"
_TRAJECTORY = f"{AGENT_FOLDER}/trajectory.json"
_VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": f"{AGENT_FOLDER}/mini",
    # The endpoint tries again by itself.
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "MSWEA_COST_TRACKING": "ignore_errors",
    # litellm would otherwise ask the network for prices when it is imported.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class MiniSweAgent:
    """mini-swe-agent, run by its own command, without confirmation by a person."""

    name = "mini-swe-agent"
    requirements = ("mini-swe-agent==2.4.6", "litellm==1.110.2")
    excluded = ("datasets", "boto3")
    """Not installed, 400 MB: its benchmark uses the one, litellm signs requests to Amazon with the
    other."""
    offers_tools = True

    def __init__(self, *, settings: Mapping[str, Any] | None = None) -> None:
        """`settings`: tables of the program's configuration, merged into its default one."""
        self._settings = dict(settings or {})

    def program(self, task: AgentTask) -> AgentProgram:
        """Return its command; limits, endpoint and task are in a settings file."""
        limits: dict[str, Any] = {"step_limit": task.max_turns, "cost_limit": 0}
        model: dict[str, Any] = {
            "model_class": "litellm",
            "model_name": f"openai/{task.model}",
            # A name with "claude" in it would otherwise add what only Anthropic's API takes.
            "set_cache_control": None,
        }
        settings = _merged(
            {
                "run": {"task": task.text},
                "agent": {"agent_class": "default", "output_path": _TRAJECTORY, **limits},
                "model": model,
                "environment": {"environment_class": "local"},
            },
            self._settings,
        )
        run = (task.python, "-I", "-m", "minisweagent.run.mini", "-o", _TRAJECTORY)
        return AgentProgram(
            argv=(*run, "-c", "mini.yaml", "-c", _SETTINGS),
            environment={**endpoint_variables(task), **_VARIABLES},
            files={_SETTINGS: json.dumps(settings)},
            answer_file=_TRAJECTORY,
        )

    def answer(self, written: str) -> str:
        """Return the submission, or else the model's last message."""
        found: Any = json.loads(written)
        submitted = found["info"].get("submission")
        if submitted:
            return str(submitted).strip()
        said = [one for one in found["messages"] if one.get("role") == "assistant"]
        return str(said[-1].get("content") or "").strip() if said else ""


def _merged(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usual` with the given values put over it, table by table."""
    both = dict(usual)
    for name, value in given.items():
        inner = both.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            tables = cast(tuple[Mapping[str, Any], Mapping[str, Any]], (inner, value))
            both[name] = _merged(*tables)
        else:
            both[name] = value
    return both
