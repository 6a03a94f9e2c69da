"""The table of checks: complete, documented, and of one meaning for each version."""

import hashlib
import json
import re
from pathlib import Path

from telescope_core import probes
from telescope_envs import validation
from telescope_envs.validation import CHECKS, LEVELS, POLICY_VERSION, Level

POLICIES = Path(__file__).parent / "policies.json"
"""Version -> digest of the table it names. Lines are added, never changed."""
SOURCES = [
    path
    for room in (validation, probes)
    for path in Path(str(room.__file__)).parent.rglob("*.py")
    if path.name not in ("policy.py", "__init__.py")
]
NAMED = re.compile(rf'"((?:{"|".join(Level)})\.[a-z_]+)"')


def test_every_check_of_the_table_is_done_somewhere_and_every_one_done_is_in_it():
    named = {name for path in SOURCES for name in NAMED.findall(path.read_text())}
    assert named == set(CHECKS)


def test_a_changed_table_needs_a_new_version():
    recorded = json.loads(POLICIES.read_text())
    # The wording of `why` and `fix` may change.
    table = [(check.id, check.severity, check.what) for check in CHECKS.values()]
    digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    assert recorded[POLICY_VERSION] == digest, (
        "the table of checks changed: give POLICY_VERSION a new value and add its line to "
        f"{POLICIES.name}"
    )


def test_every_check_says_what_why_and_what_to_do():
    for check in CHECKS.values():
        assert check.level in LEVELS
        for text in (check.what, check.why, check.fix):
            assert text.endswith("."), check.id
    assert list(CHECKS) == sorted(CHECKS, key=lambda one: LEVELS.index(CHECKS[one].level))
