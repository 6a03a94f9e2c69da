"""`telescope model`: convert models of other formats for training and serving."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.verbs import Verb, verb_app
from telescope_core.base.errors import ConfigError
from telescope_core.base.terminal import escaped

DTYPES = ("float32", "bfloat16")
app = verb_app(
    {
        "import": Verb(
            ".model:import_command",
            "Turn a GGUF file into a model folder that can be trained and served.",
            needs="telescope_train",
        ),
    },
    "Bring models of other formats into the one that is trained and served.",
    epilog="""Examples:

  telescope model import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

  telescope model import model.gguf models/mine --dtype bfloat16 --json""",
)


def import_command(
    source: Annotated[str, typer.Argument(metavar="FILE", help="The GGUF file.")],
    output: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write the model to.")],
    dtype: Annotated[
        str, typer.Option(help="Type of the written weights: float32 or bfloat16.")
    ] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Turn a GGUF file into a model folder in Hugging Face format.

    Quantized weights are unpacked: training needs them as plain numbers. The folder can be given
    wherever a model is expected. It appears complete or not at all; a model that is already there
    is replaced.

    For example:

      telescope model import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path = Path(source).expanduser()
    if as_json or not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # transformers draws a bar while it unpacks weights
    if not as_json:
        typer.echo(escaped(f"reading {path} ..."))
    from telescope_train.models.gguf_import import import_gguf

    done = import_gguf(path, Path(output).expanduser(), dtype=dtype)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "path": str(done.path)}, indent=2))
        return
    num_millions = done.num_parameters / 1e6
    typer.echo(
        f"wrote {escaped(str(done.path))}: {done.architecture}, {num_millions:,.1f}M parameters"
    )
    typer.echo(f"an English sentence costs it {done.nats_per_token:.2f} nats a token")
    for note in done.notes:
        typer.echo(f"note: {note}")
