"""The one table of checks: what each proves, why it matters, how bad a finding is, what to do.

Reports name `POLICY_VERSION`, so its meaning is fixed: whoever changes the table gives it a new
version and a new line in tests/hub/validation/policies.json.
"""

import hashlib
import json
from dataclasses import dataclass

from telescope_envs.validation.records import Level, Severity

POLICY_VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table."""

    id: str
    """`level.what`."""
    severity: Severity
    what: str
    """What is true when it passes."""
    why: str
    fix: str

    @property
    def level(self) -> Level:
        """The level that its id names."""
        return Level(self.id.partition(".")[0])


def _fail(check: str, what: str, why: str, fix: str) -> Check:
    return Check(id=check, severity=Severity.FAIL, what=what, why=why, fix=fix)


def _warn(check: str, what: str, why: str, fix: str) -> Check:
    return Check(id=check, severity=Severity.WARN, what=what, why=why, fix=fix)


_STATIC = (
    _fail(
        "static.project",
        "pyproject.toml can be read and has [project] and [build-system].",
        "Everything else is read from it.",
        "Correct pyproject.toml; `telescope env init` writes one that works.",
    ),
    _fail(
        "static.build",
        "The project builds into one wheel.",
        "What is published is the wheel.",
        "Run `python -m hatchling build -t wheel` in the project and correct what it says.",
    ),
    _fail(
        "static.wheel",
        "The wheel holds one pure Python package, its metadata and one entry point.",
        "Start-up hooks, scripts and further packages would run outside the environment.",
        "Remove what the message names from the wheel.",
    ),
    _fail(
        "static.size",
        "The wheel is at most 50 MiB.",
        "Every worker machine downloads it; data belongs in a dataset.",
        "Move data into a dataset repository with a pinned revision.",
    ),
    _fail(
        "static.name",
        "The distribution is telescope-env-<owner>-<name>, and the names keep the rules.",
        "One owner must never be able to take the place of another.",
        "Rename the distribution and its package; the entry point has the bare name.",
    ),
    _fail(
        "static.version",
        "The version is written as PEP 440 writes it, without local part or epoch.",
        "Two spellings of one version would be two releases with one wheel.",
        "Write the version as the message shows it.",
    ),
    _fail(
        "static.summary",
        "The project has a description of one line.",
        "It is what people see in lists and searches.",
        "Set description in [project].",
    ),
    _fail(
        "static.license",
        "The licence is an SPDX expression.",
        "Without a licence nobody may use the environment.",
        'Set license in [project], for instance license = "Apache-2.0".',
    ),
    _fail(
        "static.readme",
        "There is a README that says what the environment is.",
        "Rewards cannot be judged by those who do not know what they pay for.",
        "Write what is asked, what earns the reward, and the settings; set readme in [project].",
    ),
    _fail(
        "static.requires_python",
        "requires-python is given and allows the Python that validates.",
        "Resolving needs it to choose a release that can run.",
        'Set requires-python, for instance ">=3.11".',
    ),
    _fail(
        "static.protocol",
        "telescope-core is a dependency, in a range that holds the installed version.",
        "The protocol between trainer and environment comes with telescope-core.",
        'Add "telescope-core>=0.1,<0.2" to dependencies.',
    ),
    _warn(
        "static.protocol_bound",
        "The range of telescope-core has an upper bound.",
        "A later protocol may not work with this release, which cannot be changed then.",
        'Write an upper bound: "telescope-core>=0.1,<0.2".',
    ),
    _fail(
        "static.dependencies",
        "Dependencies are packages of the package index, and no other environments.",
        "Addresses change and vanish; an environment's name on the index may be anybody's.",
        "Publish what is needed on the package index, or copy it into the environment.",
    ),
    _fail(
        "static.secrets",
        "No file holds a token of a known form or a private key.",
        "A release cannot be taken back: whoever downloaded it has the secret.",
        "Revoke the secret now, remove it from the file, and declare its name in `secrets`.",
    ),
    _fail(
        "static.datasets",
        "Every dataset in datasets.json is pinned to a commit.",
        "A branch moves, and with it what scores mean.",
        "Put the commit's 40 hexadecimal digits into revision.",
    ),
    _warn(
        "static.tags",
        "There are one to ten tags, in lower case.",
        "Tags are how people find environments of a kind.",
        'Set keywords in [project], for instance ["mathematics", "single-turn"].',
    ),
)
CHECKS: dict[str, Check] = {check.id: check for check in _STATIC}


def policy_digest() -> str:
    """Return a digest of what the table decides. Reasons and advice may be worded better."""
    table = [(check.id, check.severity, check.what) for check in CHECKS.values()]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
