"""Commands as tables of verbs: each verb's code is imported only when it is called."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec, resolve_name
from typing import Any, ClassVar, Literal

import typer
from typer.core import (
    CompletionItem,  # pyright: ignore[reportPrivateImportUsage] - typer has no public name for it
    TyperGroup,
)
from typer.main import get_command as build_command


@dataclass(frozen=True, slots=True)
class Verb:
    """One line of a table of verbs."""

    target: str
    """`module:name` of a typer app or of a command function; `.module` is one of this package."""
    help: str
    _: KW_ONLY
    settings: Literal["", "environment", "environments", "sft", "train"] = ""
    """Whose settings it takes as flags, which it checks itself; empty for none."""
    needs: str = ""
    """Import name of the optional package that it needs, `telescope_EXTRA`; empty if none."""

    @property
    def module(self) -> str:
        """Name of the module of its target."""
        return resolve_name(self.target.partition(":")[0], "telescope_cli")

    @property
    def is_group(self) -> bool:
        """Whether its target is a typer app, with verbs of its own."""
        return self.target.endswith("app")


class VerbGroup(TyperGroup):
    """A command group that lists its verbs from a table and imports a verb when it is called."""

    verbs: ClassVar[Mapping[str, Verb]] = {}
    epilog_text: ClassVar[str] = ""
    prints_texts_of_others: ClassVar[bool] = False
    """Whether all output of its verbs is escaped."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        if not self.prints_texts_of_others:
            return super().invoke(ctx)
        from telescope_cli.output import escaped_output

        with escaped_output():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs whose code is installed."""
        return [name for name, verb in self.verbs.items() if _is_present(verb)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the verb; None when there is no such verb."""
        if not self._has(cmd_name):
            return None
        verb = self.verbs[cmd_name]
        return None if ctx.resilient_parsing and _lacks(verb) else _load(cmd_name, verb)

    def _has(self, name: str) -> bool:
        """Return whether there is such a verb, without a look for the code of all others."""
        verb = self.verbs.get(name)
        return verb is not None and _is_present(verb)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find verbs of one or two words; an unknown one is an error that suggests the nearest."""
        two_words = " ".join(args[:2])
        if len(args) > 1 and self._has(two_words):
            args = [two_words, *args[2:]]
        is_unknown = args and not self._has(args[0])
        # A shell that completes a line must not get words about it.
        if is_unknown and not args[0].startswith("-") and not ctx.resilient_parsing:
            from telescope_core.base.errors import UnknownNameError, unknown_name

            if places := _places(ctx.find_root().command, args[0], ctx):
                meant = " or ".join(f"'telescope {place}'" for place in places)
                raise UnknownNameError(f"unknown command {args[0]!r}; did you mean {meant}?")
            raise unknown_name("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer verbs of one word; the first word of two is a verb too, and offers the second."""
        return [one for one in super().shell_complete(ctx, incomplete) if " " not in one.value]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs without importing them."""
        rows = [(name, self.verbs[name].help) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Print the examples without rewrapping their lines."""
        formatter.write_paragraph()
        formatter.write(
            "".join(f"{line}\n" for line in self.epilog_text.split("\n") if line.strip())
        )


def verb_app(
    verbs: Mapping[str, Verb],
    help: str = "",
    *,
    epilog: str,
    prints_texts_of_others: bool = False,
    add_completion: bool = False,
) -> typer.Typer:
    """Return the app of a group of verbs; without `help`, the caller gives it a callback."""
    table = {
        "verbs": verbs,
        "epilog_text": epilog,
        "prints_texts_of_others": prints_texts_of_others,
    }
    app = typer.Typer(
        cls=type("Verbs", (VerbGroup,), table),
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if help:
        app.callback(help=help)(lambda: None)
    return app


def _is_present(verb: Verb) -> bool:
    return find_spec(verb.module) is not None


def _lacks(verb: Verb) -> bool:
    """Return whether the package that the verb needs is not installed."""
    return bool(verb.needs) and find_spec(verb.needs) is None


def _places(group: Any, word: str, ctx: Any) -> list[str]:
    """Return the commands of `group`, and of groups in it, whose last word is `word`."""
    places: list[str] = []
    for name in group.list_commands(ctx):
        if name.split()[-1] == word:
            places.append(name)
        verb = group.verbs.get(name) if isinstance(group, VerbGroup) else None
        if verb is not None and verb.is_group and not _lacks(verb):
            places += [f"{name} {place}" for place in _places(_load(name, verb), word, ctx)]
    return places


def _load(name: str, verb: Verb) -> Any:
    if _lacks(verb):
        from telescope_core.base.errors import ConfigError

        raise ConfigError(
            f"telescope {name} needs {verb.needs.replace('_', '-')}, which is not installed; "
            f"run: pip install 'telescope-cli[{verb.needs.removeprefix('telescope_')}]'"
        )
    target = getattr(import_module(verb.module), verb.target.partition(":")[2])
    if not isinstance(target, typer.Typer):
        settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
        if verb.settings:
            settings |= {"allow_extra_args": True, "ignore_unknown_options": True}
        function, target = target, typer.Typer(rich_markup_mode=None, add_completion=False)
        target.command(context_settings=settings)(function)
    command = command_of(target)
    if verb.settings:
        command.shell_complete = partial(_completed, command.shell_complete, verb)
    if verb.settings and all(one.param_type_name == "option" for one in command.params):
        # Files are taken from what no parameter took, so that the usage would not name them.
        command.options_metavar = "[FILE]... [OPTIONS]"
    return command


def _completed(by_typer: Callable[..., list[Any]], verb: Verb, ctx: Any, incomplete: str) -> Any:
    """Return what typer offers for `incomplete`, and after it the settings that the verb takes."""
    from telescope_cli.completion import setting_texts

    texts = setting_texts(verb.settings, ctx, incomplete)
    return [*by_typer(ctx, incomplete), *map(CompletionItem, texts)]


def command_of(app: typer.Typer) -> Any:
    """Return the app's command; it imports pydantic only when an option needs conversion.

    Typer 0.29 builds a pydantic adapter for each option, even for those that were not given. That
    takes a tenth of a second, a noticeable delay when listing environments or pressing TAB.
    """
    command: Any = build_command(app)
    command.get_params = partial(_quick_parameters, command.get_params)
    return command


def _quick_parameters(get_params: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    parameters = get_params(ctx)
    for parameter in parameters:
        described = getattr(parameter, "type_descriptor", None)
        is_plain = described is not None and described.parameter_info.parser is None
        if is_plain and "process_value" not in vars(parameter):
            parameter.process_value = partial(_process, parameter, parameter.process_value)
    return parameters


def _process(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Process a parameter's value; calls its own `process_value`, `convert`, only if needed."""
    is_missing = value is None or value == ()
    takes_many = parameter.multiple or parameter.nargs == -1
    if (parameter.required and is_missing) or not _is_converted(parameter, value):
        return convert(ctx, value)
    if takes_many:
        value = list(value) if value else ()
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _is_converted(parameter: Any, value: Any) -> bool:
    """Return whether the value already has the type that the command function expects."""
    annotation = parameter.type_descriptor.annotation
    if value is None:
        return True
    if annotation == list[str]:
        return not isinstance(value, str) and all(isinstance(one, str) for one in value)
    is_exact = type(value) is annotation
    return is_exact and (annotation is str or value == parameter.default)
