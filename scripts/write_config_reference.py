"""Writes docs/reference/config.md from the schema of `telescope train`: run it after a change."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from telescope_core.settings.config import leaf_paths
from telescope_train.config.names import FOREIGN_NAMES, NO_EQUAL_NAMES, REFUSED_NAMES
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
INTRODUCTION = """# Settings of `telescope train`

Written by `scripts/write_config_reference.py` from the schema; do not edit.

Each setting has a flag, with its section or without: `--rollout.group_size 16` or
`--group_size 16`. How files and flags are layered: [write settings](../how-to/settings.md).
"""
FIRST = (
    *("name", "model", "number_of_steps", "output_dir", "seed"),
    *("group_size", "prompts_batch_size_for_trainer", "max_tokens", "temperature"),
    *("max_async_rollout", "max_concurrent_prompts_per_server"),
    *("algorithm", "use_ppo_clip", "kl_penalty_tau", "filter_overlong"),
    *("learning_rate", "lr_scheduler", "warmup_steps", "seq_len", "use_lora"),
    *("trainer_num_workers", "inference_num_workers", "inference_tensor_parallel_size"),
    *("colocate", "max_model_len", "gpu_memory_utilization"),
    *("checkpoint_every", "resume_from_checkpoint", "eval_before_training", "use_wandb"),
)
"""What most people set, in the order of the page; all of `[[environments]]` and `[[evals]]` too."""
LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def reference() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION, "\n".join(first_settings())]
    for name, info in TrainConfig.model_fields.items():
        model = info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            parts.append(section(f"[{name}]", model))
        else:
            parts.append(section(f"[[{name}]]", EnvironmentEntry))
    parts.append(section("[[evals.evals]]", EvalEntry))
    parts.append("\n".join(other_names()))
    return "\n".join(parts)


def first_settings() -> Iterator[str]:
    """Yield the settings of `FIRST`, each with its section and the first sentence about it."""
    yield "## What most people set first"
    yield ""
    yield (
        "A run needs a name, a model, a number of steps and one entry of "
        "[`[[environments]]`](#environments); [`[[evals]]`](#evalsevals) says how well the model "
        "does on other examples. The rest has a default:"
    )
    yield ""
    yield "| section | setting | default | |"
    yield "|---|---|---|---|"
    models = {name: info.annotation for name, info in TrainConfig.model_fields.items()}
    homes = {path[-1]: path[0] for path in leaf_paths(TrainConfig).values() if len(path) == 2}
    for name in FIRST:
        info = models[homes[name]].model_fields[name]
        default = "required" if info.is_required() else f"`{default_text(info)}`"
        about = re.split(r"[;:] |\.$|\. ", help_texts(models[homes[name]])[name])[0]
        yield f"| [{homes[name]}](#{homes[name]}) | `{name}` | {default} | {about}. |"
    yield ""


def section(title: str, model: type[BaseModel]) -> str:
    """Return one table."""
    schema = model.model_json_schema()["properties"]
    rows = [f"## `{title}`", "", inspect.cleandoc(model.__doc__ or ""), ""]
    rows += ["| setting | type | default | |", "|---|---|---|---|"]
    about = help_texts(model)
    for name, info in model.model_fields.items():
        kind = type_text(schema[name]).replace("|", "\\|")
        default = "required" if info.is_required() else f"`{default_text(info)}`"
        if name not in about:
            raise SystemExit(f"{model.__name__}.{name} needs a docstring under it")
        rows.append(f"| `{name}` | {kind} | {default} | {about[name]} |")
    return "\n".join([*rows, ""])


def help_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring under each field of a section, by the name of the field, in one line."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith("telescope_"):
            body = ast.parse(inspect.getsource(base)).body[0].body
            for field, text in pairwise(body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(about))):
                        texts[name] = " ".join(about.split())
    return texts


def default_text(info: Any) -> str:
    """Return the default as it would be written as JSON."""
    value = info.default if info.default is not PydanticUndefined else info.default_factory()
    return json.dumps(value)


def type_text(schema: Mapping[str, Any]) -> str:
    """Return the type and range of a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value_text(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return list_text(schema)
    kind = {"object": "table", "string": "text"}.get(schema.get("type", ""), schema.get("type"))
    limits = [f"{words} {schema[key]:g}" for key, words in LIMITS.items() if key in schema]
    return ", ".join([kind or "table", *limits])


def value_text(value: object) -> str:
    """Return a value of a choice as it is written in a file, without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def list_text(schema: Mapping[str, Any]) -> str:
    """Return the type of a list in words."""
    if "prefixItems" in schema:
        return f"[{', '.join(type_text(item) for item in schema['prefixItems'])}]"
    items = schema["items"]
    return "list of tables" if "$ref" in items else f"list of: {type_text(items)}"


def other_names() -> Iterator[str]:
    """Yield the section about names that are not settings of this version."""
    yield "## Names that are answered, not accepted"
    yield ""
    yield (
        "Names of verifiers, TRL, AReaL, prime-rl, verl, SkyRL, slime, OpenRLHF, NeMo-RL and "
        "Atropos, and of earlier versions of Telescope. A file with such names is answered in one "
        "message. A run of an earlier version goes on whatever it recorded "
        "([which settings are gone](../design/124-fewer-settings.md)). First what is called "
        "otherwise here:"
    )
    yield ""
    yield from grouped(
        "setting here", FOREIGN_NAMES, lambda answer: f"`{answer.partition(': ')[0]}`"
    )
    yield ""
    yield "Without an equal here (`critic.**` is all of a section):"
    yield ""
    yield from grouped("what to know", NO_EQUAL_NAMES, str)
    yield ""
    yield (
        "Refused for the rollouts that are trained on (evaluations have them): "
        + ", ".join(f"`{name}`" for name in REFUSED_NAMES)
        + "; [why](../design/035-sampling.md)."
    )
    yield ""


def grouped(title: str, answers: Mapping[str, str], shown: Callable[[str], str]) -> Iterator[str]:
    """Yield a table of the names that have the same answer."""
    names: dict[str, list[str]] = {}
    for name, answer in answers.items():
        names.setdefault(shown(answer), []).append(f"`{name}`")
    yield f"| {title} | names elsewhere |"
    yield "|---|---|"
    for answer in sorted(names):
        yield f"| {answer} | {', '.join(sorted(names[answer]))} |"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
