"""`telescope hub`: the table of its verbs, for users and maintainers of registries."""

from telescope_cli.verbs import Verb, verb_app

VERBS = {
    "init": Verb(
        target="telescope_cli.hub.init:init",
        help="Create a registry: a folder to publish to.",
    ),
    "login": Verb(
        target="telescope_cli.hub.login:login",
        help="Store a token for a registry in the system keyring.",
    ),
    "logout": Verb(
        target="telescope_cli.hub.login:logout", help="Remove a registry's token from the keyring."
    ),
    "check": Verb(
        target="telescope_cli.hub.check:check",
        help="Check a registry: records, wheels, names and git history.",
    ),
    "render": Verb(
        target="telescope_cli.hub.render:render_registry",
        help="Write a registry as files for any static host, with pages for pip and uv.",
    ),
    "schemas": Verb(
        target="telescope_cli.hub.schemas:schemas",
        help="Write the JSON Schemas of a registry's files into the registry.",
    ),
    "serve": Verb(
        target="telescope_cli.hub.serve:serve",
        help="Serve a registry: its files, a simple index, publishing with tokens.",
    ),
    "namespace": Verb(
        target="telescope_cli.hub.namespaces:app",
        help="Add, list, suspend and restore the owners of a served registry.",
    ),
    "token": Verb(
        target="telescope_cli.hub.tokens:app",
        help="Create, list and revoke the tokens of a served registry.",
    ),
    "alias": Verb(
        target="telescope_cli.hub.aliases:app",
        help="Give environments of a served registry a short name.",
    ),
    "audit": Verb(
        target="telescope_cli.hub.audit:audit",
        help="List who changed what in a served registry, and when.",
    ),
}
EPILOG = """Examples:

  telescope hub login --registry corp

  telescope hub check registry --against origin/main

  telescope hub render registry public

`telescope hub VERB --help` explains one verb."""


app = verb_app(
    VERBS,
    "Manage registries of environments: store tokens, and check, render and serve registries.",
    epilog=EPILOG,
    prints_texts_of_others=True,
)
