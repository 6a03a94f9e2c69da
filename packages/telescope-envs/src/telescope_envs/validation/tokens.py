"""Finding secrets in text by the shapes that their issuers give them.

Only shapes that nothing else has are listed, because people would switch off a check that raises a
false alarm at each push.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SHAPES = {
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_[A-Za-z0-9_]{50,}\b",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Hugging Face token": r"\bhf_[A-Za-z]{34,}\b",
    "an Anthropic key": r"\bsk-ant-[A-Za-z0-9_-]{32,}",
    "an OpenAI key": r"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{20,}T3BlbkFJ[A-Za-z0-9_-]{20,}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{20,}",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a Stripe key": r"\b[rs]k_live_[0-9A-Za-z]{20,}\b",
    "a package index token": r"\bpypi-AgEI[A-Za-z0-9_-]{50,}",
    "a signed web token": r"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{20,}",
}
_PATTERNS = {kind: re.compile(shape) for kind, shape in _SHAPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """One secret. It holds only the beginning, so that a report does not reveal the secret."""

    kind: str
    line: int
    beginning: str


def secrets_in(text: str) -> Iterator[Secret]:
    """Yield what looks like a secret in `text`."""
    for kind, pattern in _PATTERNS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Secret(kind=kind, line=line, beginning=f"{match[0][:8]}...")
