"""`Findings`: collect the findings of checks, and convert them into the results of a report."""

from collections import defaultdict
from collections.abc import Iterable

from telescope_envs.validation.policy import CHECKS
from telescope_envs.validation.records import CheckResult, Evidence, Level, Outcome, Severity

MAX_EVIDENCE = 5
"""Pieces of evidence kept for each check; more of the same adds nothing."""
_MAX_COMPLETION = 300


class Findings:
    """Collects the outcome of each check in the policy table; an unknown id is a bug."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._evidence: defaultdict[str, list[Evidence]] = defaultdict(list)
        self._not_applicable: dict[str, str] = {}
        self._not_run: dict[str, str] = {}
        self._inconclusive: dict[str, str] = {}
        self._cut_short: dict[Level, str] = {}
        self.facts: dict[str, float | str] = {}

    def passed(self, check: str) -> None:
        """Record that `check` was completed; it passes unless it has findings."""
        self._passed.add(_known(check))

    def found(self, check: str, text: str, *, example_id: str = "", completion: str = "") -> None:
        """Record one finding of `check`."""
        kept = self._evidence[_known(check)]
        if len(kept) < MAX_EVIDENCE:
            said = shortened(completion)
            kept.append(Evidence(text=text, example_id=example_id, completion=said))

    def not_applicable(self, check: str, reason: str) -> None:
        """Record that `check` does not apply."""
        self._not_applicable[_known(check)] = reason

    def inconclusive(self, check: str, reason: str) -> None:
        """Record that too little of `check` could be tried; its findings still count."""
        self._inconclusive.setdefault(_known(check), reason)

    def cut_short(self, check: str, reason: str) -> None:
        """Record that the level ended during `check`, through no known fault of the environment."""
        self.inconclusive(check, reason)
        self._cut_short[CHECKS[check].level] = f"the level ended during {check}"

    def not_run(self, checks: Iterable[str], reason: str) -> None:
        """Record why `checks` cannot run, except those with a known result."""
        for check in checks:
            self._not_run.setdefault(_known(check), reason)

    def has_found(self, check: str) -> bool:
        """Return whether `check` has findings so far."""
        return check in self._evidence

    def has_failed(self, level: Level) -> bool:
        """Return whether a check of `level` failed, which prevents publishing the environment."""
        results = self.results("")
        return any(one.level is level and one.outcome is Outcome.FAIL for one in results)

    def results(self, otherwise: str) -> tuple[CheckResult, ...]:
        """Return the result of every check in the policy table.

        A check passes only if `passed` was called for it. `otherwise` is the reason given for
        checks about which nothing was recorded.
        """
        return tuple(self._result(check, otherwise) for check in CHECKS)

    def _result(self, check: str, otherwise: str) -> CheckResult:
        about = CHECKS[check]
        evidence = tuple(self._evidence.get(check, ()))
        reason = ""
        if evidence:
            is_fatal = about.severity is Severity.FAIL
            outcome = Outcome.FAIL if is_fatal else Outcome.WARN
        elif check in self._inconclusive:
            outcome, reason = Outcome.INCONCLUSIVE, self._inconclusive[check]
        elif check in self._not_applicable:
            outcome, reason = Outcome.NOT_APPLICABLE, self._not_applicable[check]
        elif check in self._passed:
            outcome = Outcome.PASS
        elif about.level in self._cut_short and check not in self._not_run:
            outcome, reason = Outcome.INCONCLUSIVE, self._cut_short[about.level]
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
    """Return `text` with unprintable characters escaped, and cut in the middle if it is long."""
    if len(text) > _MAX_COMPLETION:
        half = _MAX_COMPLETION // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _known(check: str) -> str:
    assert check in CHECKS, f"check {check!r} is not in the policy table"
    return check
