"""`telescope env`: the table of its verbs."""

from telescope_cli.verbs import Verb, verb_app

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
        help="Describe one environment: rewards, settings, versions and usage.",
    ),
    "install": Verb(
        target="telescope_cli.env.install:install",
        help="Check environments against the registry and install them.",
    ),
    "sync": Verb(
        target="telescope_cli.env.sync:sync", help="Install exactly what telescope.lock lists."
    ),
    "update": Verb(
        target="telescope_cli.env.update:update",
        help="Update environments to newer releases, and show what changes.",
    ),
    "link": Verb(
        target="telescope_cli.env.link:link",
        help="Use an environment from its project folder, for development.",
    ),
    "tree": Verb(
        target="telescope_cli.env.tree:tree", help="Show what installed environments depend on."
    ),
    "verify": Verb(
        target="telescope_cli.env.verify:verify_environments",
        help="Check installed environments: files, packages, lock and registry.",
    ),
    "bundle": Verb(
        target="telescope_cli.env.bundle:bundle",
        help="Write one file from which environments install without network access.",
    ),
    "uninstall": Verb(
        target="telescope_cli.env.install:uninstall", help="Remove installed environments."
    ),
    "init": Verb(
        target="telescope_cli.env.project:init",
        help="Create a project: a working environment with tests.",
    ),
    "validate": Verb(
        target="telescope_cli.env.validate:validate",
        help="Check an environment: files, loading, rewards, leaks and tools.",
    ),
    "check-grader": Verb(
        target="telescope_cli.env.check_grader:check_grader",
        help="Show which wrong answers, near the right one, a grader accepts.",
    ),
    "export": Verb(
        target="telescope_cli.env.export:export",
        help="Write an environment's examples as task folders of Harbor.",
    ),
    "build": Verb(
        target="telescope_cli.env.project:build",
        help="Build a project's wheel reproducibly, and inspect it.",
    ),
    "push": Verb(
        target="telescope_cli.env.push:push",
        help="Publish a project: build, check, validate, upload.",
    ),
    "yank": Verb(
        target="telescope_cli.env.status:yank",
        help="Withdraw one version, so that it is no longer chosen.",
    ),
    "deprecate": Verb(
        target="telescope_cli.env.status:deprecate",
        help="Mark an environment as one that should no longer be used.",
    ),
}
EPILOG = """Examples:

  telescope env search arithmetic

  telescope env install math-reasoning countdown@0.1.0

`telescope env VERB --help` explains one verb."""


app = verb_app(
    VERBS,
    "Find, install, check and remove environments.",
    epilog=EPILOG,
    prints_texts_of_others=True,
)
