"""`Findings`: what the checks found so far, and turning it into the results of a report."""

from collections import defaultdict
from collections.abc import Iterable

from telescope_envs.validation.policy import CHECKS
from telescope_envs.validation.records import CheckResult, Evidence, Level, Outcome, Severity

MAX_EVIDENCE = 5
"""Kept of each check: more of the same says nothing new."""
_MAX_COMPLETION = 300


class Findings:
    """Collects what happened to each check of the table; an unknown id is a defect of ours."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._evidence: defaultdict[str, list[Evidence]] = defaultdict(list)
        self._not_applicable: dict[str, str] = {}
        self._not_run: dict[str, str] = {}
        self.facts: dict[str, float | str] = {}

    def passed(self, check: str) -> None:
        """Say that `check` was done; it passes unless something was found."""
        self._passed.add(_known(check))

    def found(self, check: str, text: str, *, example_id: str = "", completion: str = "") -> None:
        """Say what `check` found."""
        kept = self._evidence[_known(check)]
        if len(kept) < MAX_EVIDENCE:
            said = shortened(completion)
            kept.append(Evidence(text=text, example_id=example_id, completion=said))

    def not_applicable(self, check: str, reason: str) -> None:
        """Say that there is nothing to check."""
        self._not_applicable[_known(check)] = reason

    def not_run(self, checks: Iterable[str], reason: str) -> None:
        """Say why `checks` cannot be done; what is known of one already stands."""
        for check in checks:
            self._not_run.setdefault(_known(check), reason)

    def has_found(self, check: str) -> bool:
        """Whether `check` has found anything so far."""
        return check in self._evidence

    def has_failed(self, level: Level) -> bool:
        """Whether anything of `level` keeps the environment from being published."""
        results = self.results("")
        return any(one.level is level and one.outcome is Outcome.FAIL for one in results)

    def results(self, otherwise: str) -> tuple[CheckResult, ...]:
        """Return every check of the table; `otherwise` is why those nobody spoke of were not run.

        Only a check that said so has passed.
        """
        return tuple(self._result(check, otherwise) for check in CHECKS)

    def _result(self, check: str, otherwise: str) -> CheckResult:
        about = CHECKS[check]
        evidence = tuple(self._evidence.get(check, ()))
        reason = ""
        if evidence:
            is_fatal = about.severity is Severity.FAIL
            outcome = Outcome.FAIL if is_fatal else Outcome.WARN
        elif check in self._not_applicable:
            outcome, reason = Outcome.NOT_APPLICABLE, self._not_applicable[check]
        elif check in self._passed:
            outcome = Outcome.PASS
        else:
            outcome, reason = Outcome.NOT_RUN, self._not_run.get(check, otherwise)
        return CheckResult(
            id=check,
            level=about.level,
            severity=about.severity,
            outcome=outcome,
            reason=reason,
            evidence=evidence,
            fix=about.fix if evidence else "",
        )


def shortened(text: str) -> str:
    """Return `text` in printable ASCII escapes, its middle left out when it is long."""
    if len(text) > _MAX_COMPLETION:
        half = _MAX_COMPLETION // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _known(check: str) -> str:
    assert check in CHECKS, f"check {check!r} is not in the policy table"
    return check
