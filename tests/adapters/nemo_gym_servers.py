"""Published resources servers of NeMo Gym, run in the virtual environment of the package.

argv: "serve", a server and a port; "data" and a server: prints the path of its rows; or "verify", a
server and a file with pairs of a row and what was said: prints the rewards of its own verifier.
"""

import asyncio
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import nemo_gym


def main(what, server, *rest):
    folder = Path(nemo_gym.__file__).parents[1] / "resources_servers" / server
    if what == "data":
        print(json.dumps(str(folder / "data" / "example.jsonl")))
    elif what == "serve":
        # As their command starts each server: its own file, with the settings in the environment.
        own = {"entrypoint": "app.py", "domain": "agent", "host": "127.0.0.1", "port": int(rest[0])}
        settings = {
            "dry_run": False,
            "head_server": {"host": "127.0.0.1", "port": 1},
            server: {"resources_servers": {server: own}},
        }
        os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(settings)
        os.environ["NEMO_GYM_CONFIG_PATH"] = server
        sys.argv = ["app.py"]
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    else:
        print(json.dumps(asyncio.run(verified(server, json.loads(Path(rest[0]).read_text())))))


async def verified(server, pairs):
    """Return what the verifier of a server says when it is called directly."""
    from nemo_gym.base_resources_server import SimpleResourcesServer
    from nemo_gym.server_utils import ServerClient

    app = importlib.import_module(f"resources_servers.{server}.app")
    [kind] = [
        one
        for one in vars(app).values()
        if isinstance(one, type)
        and issubclass(one, SimpleResourcesServer)
        and one.__module__ == app.__name__
    ]
    config = kind.model_fields["config"].annotation(
        host="127.0.0.1", port=1, entrypoint="app.py", name=server, domain="agent"
    )
    made = kind(config=config, server_client=MagicMock(spec=ServerClient))
    asked = kind.verify.__annotations__["body"]
    rewards = []
    for row, messages in pairs:
        output = []
        for message in messages:
            if message["role"] == "assistant":
                output += [
                    {"type": "function_call", "call_id": one["id"], **one["function"]}
                    for one in message.get("tool_calls", ())
                ]
                if message["content"]:
                    text = {"type": "output_text", "text": message["content"], "annotations": []}
                    output.append(
                        {"type": "message", "id": "m", "role": "assistant", "content": [text]}
                        | {"status": "completed"}
                    )
            elif message["role"] == "tool":
                told = {"call_id": message["tool_call_id"], "output": message["content"]}
                output.append({"type": "function_call_output", **told})
        response = {
            **{"id": "r", "created_at": 0, "model": "m", "object": "response", "output": output},
            **{"parallel_tool_calls": False, "tool_choice": "auto", "tools": []},
        }
        body = asked.model_validate({**row, "response": response})
        rewards.append((await made.verify(body)).reward)
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
