"""`telescope hub`: the table of its verbs, for those who use and keep registries."""

from telescope_cli.verbs import Verb, VerbGroup, verb_app

VERBS = {
    "init": Verb(
        target="telescope_cli.hub.init:init",
        help="Begin a registry: a folder that somebody may publish to.",
    ),
    "login": Verb(
        target="telescope_cli.hub.login:login",
        help="Keep a token for a registry in the keyring of this system.",
    ),
    "logout": Verb(
        target="telescope_cli.hub.login:logout", help="Remove a registry's token from the keyring."
    ),
    "check": Verb(
        target="telescope_cli.hub.check:check",
        help="Prove that a registry keeps its promises: records, wheels, history.",
    ),
    "render": Verb(
        target="telescope_cli.hub.render:render_registry",
        help="Write a registry as files for any host, with pages for pip and uv.",
    ),
    "schemas": Verb(
        target="telescope_cli.hub.schemas:schemas",
        help="Write the JSON Schemas of a registry's files into it.",
    ),
    "serve": Verb(
        target="telescope_cli.hub.serve:serve",
        help="Serve a registry that people publish to: web pages, simple index, tokens.",
    ),
    "namespace": Verb(
        target="telescope_cli.hub.namespaces:app",
        help="Say which owners a served registry has.",
    ),
    "token": Verb(
        target="telescope_cli.hub.tokens:app",
        help="Make, list and revoke the tokens of a served registry.",
    ),
    "alias": Verb(
        target="telescope_cli.hub.aliases:app",
        help="Give environments of a served registry a short name.",
    ),
}
EPILOG = """Examples:

  telescope hub login --registry corp

  telescope hub check registry --against origin/main

  telescope hub render registry public

`telescope hub VERB --help` explains one verb."""


class _Hub(VerbGroup):
    verbs = VERBS
    epilog_text = EPILOG


app = verb_app(_Hub)


@app.callback()
def hub() -> None:
    """Registries of environments: tokens for them, checking, rendering and serving one."""
