"""`telescope env`: the table of its verbs."""

from telescope_cli.verbs import Verb, VerbGroup, verb_app

VERBS = {
    "install": Verb(
        target="telescope_cli.env.install:install",
        help="Check environments against the registry and install them.",
    ),
    "list": Verb(
        target="telescope_cli.env.listing:list_environments",
        help="List environments: installed, linked, locked, and in the registry.",
    ),
    "info": Verb(
        target="telescope_cli.env.info:info",
        help="Describe one environment: rewards, settings, versions, how to use it.",
    ),
    "sync": Verb(
        target="telescope_cli.env.sync:sync", help="Install exactly what telescope.lock names."
    ),
    "uninstall": Verb(
        target="telescope_cli.env.install:uninstall", help="Remove installed environments."
    ),
    "validate": Verb(
        target="telescope_cli.env.validate:validate",
        help="Check an environment: files, loading, rewards, leaks and tools.",
    ),
}
EPILOG = """Examples:

  telescope env list

  telescope env install math-reasoning countdown@0.1.0

`telescope env VERB --help` explains one verb."""


class _Env(VerbGroup):
    verbs = VERBS
    epilog_text = EPILOG


app = verb_app(_Env)


@app.callback()
def env() -> None:
    """Install, list, describe and remove environments."""
