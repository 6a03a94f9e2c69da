"""`telescope env`: the table of its verbs."""

from telescope_cli.verbs import Verb, verb_app

VERBS = {
    "search": Verb(".env.listing:search", "Find environments by name, tag and description."),
    "list": Verb(
        ".env.listing:list_environments",
        "List environments: installed, linked, locked, and in the registry.",
    ),
    "info": Verb(
        ".env.info:info", "Describe one environment: rewards, settings, versions and usage."
    ),
    "install": Verb(
        ".env.install:install", "Check environments against the registry and install them."
    ),
    "sync": Verb(".env.install:sync", "Install exactly what telescope.lock lists."),
    "update": Verb(
        ".env.install:update", "Update environments to newer releases, and show what changes."
    ),
    "link": Verb(".env.link:link", "Use an environment from its project folder, for development."),
    "tree": Verb(".env.installed:tree", "Show what installed environments depend on."),
    "verify": Verb(
        ".env.installed:verify_environments",
        "Check installed environments: files, packages, lock and registry.",
    ),
    "bundle": Verb(
        ".env.bundle:bundle",
        "Write one file from which environments install without network access.",
    ),
    "uninstall": Verb(".env.install:uninstall", "Remove installed environments."),
    "init": Verb(".env.project:init", "Create a project: a working environment with tests."),
    "validate": Verb(
        ".env.validate:validate",
        "Check an environment: files, loading, rewards, leaks and tools.",
        settings="environment",
    ),
    "check-grader": Verb(
        ".env.validate:check_grader",
        "Show which wrong answers, near the right one, a grader accepts.",
        settings="environment",
    ),
    "export": Verb(
        ".env.export:export", "Write an environment's examples as task folders of Harbor."
    ),
    "build": Verb(".env.project:build", "Build a project's wheel reproducibly, and inspect it."),
    "push": Verb(
        ".env.push:push",
        "Publish a project: build, check, validate, upload.",
        settings="environment",
    ),
    "yank": Verb(".env.status:yank", "Withdraw one version, so that it is no longer chosen."),
    "deprecate": Verb(
        ".env.status:deprecate", "Mark an environment as one that should no longer be used."
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
