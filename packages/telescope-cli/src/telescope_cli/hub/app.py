"""`telescope hub`: the table of its verbs, for users and maintainers of registries."""

from telescope_cli.verbs import Verb, verb_app

VERBS = {
    "init": Verb(".hub.folder:init", "Create a registry: a folder to publish to."),
    "login": Verb(".hub.login:login", "Store a token for a registry in the system keyring."),
    "logout": Verb(".hub.login:logout", "Remove a registry's token from the keyring."),
    "check": Verb(".hub.folder:check", "Check a registry: records, wheels, names and git history."),
    "render": Verb(
        ".hub.folder:render_registry",
        "Write a registry as files for any static host, with pages for pip and uv.",
    ),
    "schemas": Verb(
        ".hub.folder:schemas", "Write the JSON Schemas of a registry's files into the registry."
    ),
    "serve": Verb(
        ".hub.serve:serve", "Serve a registry: its files, a simple index, publishing with tokens."
    ),
    "namespace": Verb(
        ".hub.serve:namespace_app",
        "Add, list, change, suspend and restore the owners of a served registry.",
    ),
    "token": Verb(".hub.tokens:app", "Create, list and revoke the tokens of a served registry."),
    "alias": Verb(".hub.serve:alias_app", "Give environments of a served registry a short name."),
    "audit": Verb(".hub.serve:audit", "List who changed what in a served registry, and when."),
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
