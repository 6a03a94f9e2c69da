"""Report the declarations of an environment's class. `loading` runs this file as a program.

It runs in the interpreter that can import the environment. There, telescope-core may be the only
part of Telescope, so this module imports no other.
"""

import asyncio
import hashlib
import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

from telescope_core.base.errors import EnvironmentLoadError, TelescopeError
from telescope_core.environments import Environment
from telescope_core.finding.locate import load_environment_class
from telescope_core.playing.in_process import InProcessEnvironment

_Settings = dict[str, Any]


class _WithFactories(GenerateJsonSchema):
    """Writes the defaults that factories make, too."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        factory: Any = schema.get("default_factory")
        if factory is not None and not schema.get("default_factory_takes_data"):
            schema = {**schema, "default": factory()}
        return super().default_schema(schema)


def schema_of(environment_class: type[Environment]) -> dict[str, Any]:
    """Return the JSON schema of the settings of an environment."""
    return environment_class.Config.model_json_schema(schema_generator=_WithFactories)


def built(factory: str, settings: _Settings) -> dict[str, Any]:
    """Build the importable `module:Class` with `settings`; returns nothing about it."""
    load_environment_class(factory).from_settings(settings)
    return {}


def schema(factory: str, settings: _Settings) -> dict[str, Any]:
    """Return the JSON schema of its settings."""
    return schema_of(load_environment_class(factory))


def declarations(factory: str, settings: _Settings) -> dict[str, Any]:
    """Return the declarations of the environment, without loading its examples."""
    environment_class = load_environment_class(factory)
    environment = environment_class.from_settings(settings)
    settings = schema_of(environment_class)
    text = json.dumps(settings, sort_keys=True)
    return {
        "splits": sorted(str(split) for split in environment.splits()),
        "reward": {
            "minimum": environment.reward_min,
            "maximum": environment.reward_max,
            "success": environment.success_threshold,
        },
        "reward_weights": _weights(environment),
        "network": environment.network,
        "secrets": sorted(environment.secrets),
        "config_schema": settings,
        "config_schema_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _weights(environment: Environment) -> dict[str, float]:
    """Return the factor of each reward in their sum; empty for a total of the author's own.

    As in the description of an environment, which the telescope-core here may be too old to give.
    """
    if type(environment).compute_reward is not Environment.compute_reward:
        return {}
    functions = environment.score_functions
    return {one.name: one.weight for one in functions if one.kind != "metric"}


def declared(factory: str, settings: _Settings) -> dict[str, Any]:
    """Return `declarations` with the sizes of splits, which may require loading data."""
    environment = load_environment_class(factory).from_settings(settings)
    about = asyncio.run(InProcessEnvironment(environment, name=factory).describe())
    sizes = {str(split): size for split, size in about.num_examples.items()}
    return {**declarations(factory, settings), "splits": sizes}


def task_files(factory: str, settings: _Settings) -> dict[str, Any]:
    """Return the files of the task folder of each example: split -> id -> path -> text."""
    environment = load_environment_class(factory).from_settings(settings)
    if type(environment).task_files is Environment.task_files:
        raise EnvironmentLoadError(
            "it has no method task_files, which gives the files of an example; only environments "
            "that work on files can be exported"
        )

    async def found() -> dict[str, Any]:
        sizes = {
            split: environment.fetcher.source(split).num_examples for split in environment.splits()
        }
        if None in sizes.values():
            raise EnvironmentLoadError("its examples have no end, so they cannot be exported")
        tasks: dict[str, Any] = {}
        for split, size in sizes.items():
            examples = [await environment.fetcher.get(split, index) for index in range(size or 0)]
            tasks[str(split)] = {one.id: environment.task_files(one) for one in examples}
        return tasks

    return asyncio.run(found())


QUESTIONS = {one.__name__: one for one in (built, schema, declarations, declared, task_files)}


def main(question: str, factory: str, settings: str, *search_path: str) -> None:
    """Print the answer to `question` as a last line of JSON."""
    sys.path[:0] = search_path
    try:
        answer = QUESTIONS[question](factory, json.loads(settings))
    except TelescopeError as error:
        sys.exit(" ".join(str(error).split()))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
