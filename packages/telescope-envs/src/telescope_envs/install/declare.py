"""What an environment's class declares. `probe.py` runs this module as a program.

As a program it runs in the environment's own virtual environment. There, telescope-core is the only
part of Telescope, so this module imports no other.
"""

import asyncio
import hashlib
import json
import sys
from typing import Any

from telescope_core.in_process import InProcessEnvironment
from telescope_core.locate import load_environment_class


def declarations(factory: str) -> dict[str, Any]:
    """Return what the importable `module:Class` declares, without loading its examples."""
    environment_class = load_environment_class(factory)
    environment = environment_class.from_settings({})
    schema = json.dumps(environment_class.Config.model_json_schema(), sort_keys=True)
    return {
        "splits": sorted(str(split) for split in environment.splits()),
        "reward": {
            "minimum": environment.reward_min,
            "maximum": environment.reward_max,
            "success": environment.success_threshold,
        },
        "network": environment.network,
        "secrets": sorted(environment.secrets),
        "config_schema_sha256": hashlib.sha256(schema.encode()).hexdigest(),
    }


def declared(factory: str) -> dict[str, Any]:
    """Return `declarations` with the sizes of splits, which may require loading data."""
    environment = load_environment_class(factory).from_settings({})
    about = asyncio.run(InProcessEnvironment(environment, name=factory).describe())
    sizes = {str(split): size for split, size in about.num_examples.items()}
    return {**declarations(factory), "splits": sizes}


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(declarations(sys.argv[1]))}\n")
