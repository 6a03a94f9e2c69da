"""Writes docs/reference/validation.md from the table of checks: run it after a change."""

from pathlib import Path

from telescope_envs.validation import CHECKS, LEVELS, POLICY_VERSION, Level
from telescope_envs.validation.records import Outcome

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "validation.md"
INTRODUCTION = f"""# Checks of `telescope env validate`

Written by `scripts/write_validation_reference.py` from the table of checks; do not edit.

How to use it: [validate an environment](../how-to/validate-an-environment.md). This is policy
{POLICY_VERSION}; each report names the policy it was made under, and a changed table gets a new
version.

A check of severity `fail` keeps an environment from being published when it finds something; one
of severity `warn` does so with `--strict`. The levels are done in order, each only when the one
before found no failure. A check that was not done is reported as `{Outcome.NOT_RUN}` with the
reason, never as passed. One for which less than half of what was planned could be tried is
`{Outcome.INCONCLUSIVE}`, which is neither a pass nor a failure: `env validate` exits with 8,
`env push` publishes nothing, and validating again on a less busy machine may decide it. One
that has nothing to look at, such as tools where there are none, is reported as
`{Outcome.NOT_APPLICABLE}`.
"""
ABOUT = {
    Level.STATIC: "The project's files and its wheel. No code of the environment runs.",
    Level.LOAD: """\
Two processes, with different hash seeds, import the environment, build it from its default
settings and read examples: all of a finite split up to 2000, 200 of an endless one, as far as
four seconds of processor time go. They have no network: a network namespace with nothing but
loopback where the kernel allows one, else an audit hook that refuses Python's calls; the report
says which. Folders that may be written to are `XDG_CACHE_HOME`, `XDG_CONFIG_HOME`, `TMPDIR` and
`HF_HOME`; home and working directory are thrown away. No variables are
passed on but those of the machine, and the secrets that the environment declares, which are printed
first; of an installed environment, those that its release was published with.""",
    Level.REWARD: """\
Scripted answers are played by the code that plays real rollouts, in one process: each example
(`--examples`, 16 of each split) gets its gold answer and a dozen texts that are no answer; the
first two of each split get a million characters as well. The first four are played again in another
order, there and in a second process, and then all of them 64 at a time with answers of uneven
delay.

Where there are group rewards, answers to the first example are also scored as one group, with
duplicates, and once more in another order: the first must not raise (`reward.plays`) or leave the
range, and rewards must follow their rollouts (`reward.deterministic`).

The *floor* is measured: the least that an empty or blank answer earns. It may be at most half of
the way from `reward_min` to `success_threshold`. A text that is no answer may earn, on average over
the examples, at most a quarter of the way from floor to success, and never success itself. Another
example's gold answer, random words and refusals may be right by luck, so one in ten of each may
succeed (one, if there are fewer than ten). Refusals, such as `I don't know.`, are tried where no
gold answer refuses or says that there is no answer.

`reward.loop` accuses only code that is found on the event loop in two looks at the same call, so
a busy machine is not mistaken for it; what the thread waited for a processor is taken off.

Limits count the environment's own processor time, without what the scripted policy costs, on the
scale of a reference machine: 20 s for one rollout, 120 s for all that are played in turn, 30 s for
the repeats, 60 s for those at once. Time on the wall (two minutes for a rollout, five for a pass)
only ends rollouts that wait forever, and then the check is not conclusive. After a rollout that
had to be ended, no other is started.""",
    Level.LEAKAGE: """\
One process plays rollouts whose first answer is empty, and looks at prompt, system prompt, tool
schemas and first observation.

An answer such as `7` stands in many prompts by chance, and reading comprehension has its answers
in the text. So `leakage.prompt` asks whether a fixed rule finds the answer. A rule that takes
what follows or precedes the same two words, or stands at the same end, leaks when it is right for
three quarters of the examples, and for a third more of them than the most frequent answer is:
choices, yes or no, and words of a constant prompt are no leaks. An announcement such as `Answer:
46` or `the solution is 46` leaks in a single example, unless a quarter of the prompts hold the
same words. A hint that is worded anew in each prompt is not found.

Tools are called with arguments made from their schemas. Refusing them with `ToolError` is fine.
A text with a usual format (date, time, duration, UUID, email, URI, host, IP address) gets such
a text. Only you know a text of another format, or of a `pattern`: name one, as in
`Annotated[str, Field(pattern="^[A-Z]{2}-[0-9]+$", examples=["AB-12"])]`, and also where your own
validator takes less than the schema says. Without it, the tool is not called, and the check is not
conclusive; a tool of an MCP server, whose schema is not yours, is passed over.""",
}
MEASURED = """## What is measured

Facts stand beside the checks and decide nothing: `rollouts_per_second` (64 at once, scripted
model), `reward_p99_ms` and `reward_median_ms`, `slowest_rollout_s`, `memory_mb` (of the process
that played), `import_s`, `reward_floor`, `rollouts_tried` of `rollouts_planned` (fewer where
rewards are slow), `examples_<split>`, `network_cut_by`, and the seconds
of each level.

## The report

`--json` prints it, `--report FILE.json` keeps its canonical form (sorted keys, no spaces, UTF-8),
whose SHA-256 is what a release records beside policy and verdict; `--report FILE.md` is for people.
`telescope_envs.validation.report_schema()` returns its JSON Schema.

| field | |
|---|---|
| `policy` | version of the table above |
| `environment`, `version`, `wheel_sha256` | what was validated; no digest for an installed one |
| `core_version`, `python` | what played it |
| `level`, `num_examples` | what was asked for; publishing asks for all levels |
| `verdict` | `pass`, `warn`, `fail` or `not conclusive` |
| `checks` | id, level, severity, outcome, reason, fix, up to five pieces of evidence |
| `facts` | see above |

Evidence is a text, the id of an example, and what the policy was made to say.
"""


def reference() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for level in LEVELS:
        parts.append(f"## {level.value.capitalize()}\n\n{ABOUT[level]}\n")
        rows = [
            "| check | severity | true when it passes | why | what to do |",
            "|---|---|---|---|---|",
        ]
        rows += [
            f"| `{check.id}` | {check.severity} | {_cell(check.what)} | {_cell(check.why)} "
            f"| {_cell(check.fix)} |"
            for check in CHECKS.values()
            if check.level is level
        ]
        parts.append("\n".join(rows) + "\n")
    parts.append(MEASURED)
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
