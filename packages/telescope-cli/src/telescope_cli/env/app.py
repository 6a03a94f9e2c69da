"""`telescope env`: the table of its verbs."""

from telescope_cli.verbs import Verb, VerbGroup, verb_app

VERBS = {
    "search": Verb(
        target="telescope_cli.env.search:search",
        help="Find environments by name, tag and description.",
    ),
    "list": Verb(
        target="telescope_cli.env.listing:list_environments",
        help="List environments: installed, linked, locked, and in the registry.",
    ),
    "info": Verb(
        target="telescope_cli.env.info:info",
        help="Describe one environment: rewards, settings, versions, how to use it.",
    ),
    "install": Verb(
        target="telescope_cli.env.install:install",
        help="Check environments against the registry and install them.",
    ),
    "sync": Verb(
        target="telescope_cli.env.sync:sync", help="Install exactly what telescope.lock names."
    ),
    "update": Verb(
        target="telescope_cli.env.update:update",
        help="Move environments to newer releases, and say what changes.",
    ),
    "link": Verb(
        target="telescope_cli.env.link:link",
        help="Use an environment from the folder of its project, for development.",
    ),
    "tree": Verb(
        target="telescope_cli.env.tree:tree", help="Show what installed environments depend on."
    ),
    "verify": Verb(
        target="telescope_cli.env.verify:verify_environments",
        help="Check again what is installed: files, packages, lock and registry.",
    ),
    "bundle": Verb(
        target="telescope_cli.env.bundle:bundle",
        help="Write one file from which environments install without any network.",
    ),
    "uninstall": Verb(
        target="telescope_cli.env.install:uninstall", help="Remove installed environments."
    ),
    "init": Verb(
        target="telescope_cli.env.project:init",
        help="Begin a project: an environment that works, with tests.",
    ),
    "validate": Verb(
        target="telescope_cli.env.validate:validate",
        help="Check an environment: files, loading, rewards, leaks and tools.",
    ),
    "build": Verb(
        target="telescope_cli.env.project:build",
        help="Build the wheel of a project, the same bytes anywhere, and inspect it.",
    ),
    "push": Verb(
        target="telescope_cli.env.push:push",
        help="Publish a project: build, check, validate, upload.",
    ),
    "yank": Verb(
        target="telescope_cli.env.status:yank",
        help="Keep one version from being chosen.",
    ),
    "deprecate": Verb(
        target="telescope_cli.env.status:deprecate",
        help="Say that an environment should not be used any more.",
    ),
}
EPILOG = """Examples:

  telescope env search arithmetic

  telescope env install math-reasoning countdown@0.1.0

`telescope env VERB --help` explains one verb."""


class _Env(VerbGroup):
    verbs = VERBS
    epilog_text = EPILOG


app = verb_app(_Env)


@app.callback()
def env() -> None:
    """Find, install, check and remove environments."""
