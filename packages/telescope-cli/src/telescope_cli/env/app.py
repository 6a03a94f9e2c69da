"""`telescope env`: the table of its verbs."""

from telescope_cli.verbs import Verb, VerbGroup, verb_app

VERBS = {
    "install": Verb(
        target="telescope_cli.env.install:install",
        help="Check environments against the registry and install them.",
    ),
    "list": Verb(
        target="telescope_cli.env.show:list_environments",
        help="List environments: in the registry, and installed here.",
    ),
    "info": Verb(
        target="telescope_cli.env.show:info",
        help="Describe one environment: rewards, data, network, versions.",
    ),
    "uninstall": Verb(
        target="telescope_cli.env.install:uninstall", help="Remove installed environments."
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
