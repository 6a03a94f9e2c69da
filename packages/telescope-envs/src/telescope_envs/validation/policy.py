"""The table of checks: what each proves, why it matters, its severity, and how to fix a finding.

Reports name `POLICY_VERSION`, so the meaning of a version is fixed. A change to the table needs a
new version and a new line in tests/envs/validation/policies.json.
"""

import hashlib
import json
from dataclasses import dataclass

from telescope_envs.validation.records import Level, Severity

POLICY_VERSION = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table."""

    id: str
    """The level and the name of the check, such as `static.wheel`."""
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
        "The wheel is what gets published.",
        "Run `python -m hatchling build -t wheel` in the project and correct the errors it shows.",
    ),
    _fail(
        "static.wheel",
        "The wheel holds one pure Python package, its metadata and one entry point.",
        "Start-up hooks, scripts and further packages would run outside the environment.",
        "Remove from the wheel what the message names.",
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
        "One owner must never be able to impersonate another.",
        "Rename the distribution and its package; the entry point uses the bare name.",
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
        "Without a license nobody may use the environment.",
        'Set license in [project], for instance license = "Apache-2.0".',
    ),
    _fail(
        "static.readme",
        "There is a README that says what the environment is.",
        "Nobody can judge a reward without knowing what it is given for.",
        "Describe the task, what earns the reward, and the settings; set readme in [project].",
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
        "A later protocol may not work with this release, which cannot be changed once published.",
        'Write an upper bound: "telescope-core>=0.1,<0.2".',
    ),
    _fail(
        "static.dependencies",
        "Dependencies are packages of the package index, and no other environments.",
        "URLs change and vanish, and anybody may own an environment's name on the index.",
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
        "A branch moves, and the meaning of scores moves with it.",
        "Put the commit's 40 hexadecimal digits into revision.",
    ),
    _warn(
        "static.tags",
        "There are one to ten tags, in lower case.",
        "People use tags to find environments of a kind.",
        'Set keywords in [project], for instance ["mathematics", "single-turn"].',
    ),
)
_LOAD = (
    _fail(
        "load.requirements",
        "What the environment depends on is installed, or can be.",
        "Its code cannot run without its dependencies.",
        "Correct the dependency that the message names; one without a wheel needs --allow-sdist.",
    ),
    _fail(
        "load.import",
        "The module can be imported and its entry point is an Environment class.",
        "Everybody who installs the environment imports it.",
        "Correct the error; import optional packages where they are used.",
    ),
    _fail(
        "load.import_offline",
        "Importing it does not touch the network.",
        "Clusters without a network could not even list it, and imports would hang.",
        "Load data in examples(), not when the module is imported.",
    ),
    _fail(
        "load.import_time",
        "Importing it computes for at most 2 seconds, or for the same work on a slower machine.",
        "Every worker process imports it before its first rollout.",
        "Import heavy packages in the methods that use them.",
    ),
    _fail(
        "load.writes",
        "Importing, building it and reading examples write nothing outside its caches.",
        "It could not run on read-only machines, and would silently change files on others.",
        "Write below XDG_CACHE_HOME or a temporary folder, and not at import.",
    ),
    _fail(
        "load.settings",
        "It can be built from its default settings, and the schema of its settings is valid.",
        "`telescope eval NAME` runs it with nothing but defaults.",
        "Give every setting a default that works.",
    ),
    _fail(
        "load.tools",
        "Its tools can be turned into schemas.",
        "A tool without a schema cannot be offered to a model.",
        "Give the tool a docstring and every parameter a type that JSON can express.",
    ),
    _warn(
        "load.tool_docs",
        "Every parameter of a tool has a description.",
        "A model that is told names and types alone guesses what they mean.",
        "Describe it in the docstring (Args:, Parameters or :param NAME:) or in Annotated.",
    ),
    _fail(
        "load.declarations",
        "Reward range, success threshold, network and secrets make sense together.",
        "pass@k, advantages and sandboxes depend on them.",
        "Declare reward_min < reward_max and a success_threshold between them.",
    ),
    _fail(
        "load.network",
        "It needs no network unless it declares so.",
        'network = "none" promises that it runs on machines without a network.',
        'Declare network = "load" or "always", or do not use the network.',
    ),
    _fail(
        "load.examples",
        "The examples of every split can be read.",
        "Training would stop at the first example that cannot be read.",
        "Correct examples(): at least one example, and an id and a prompt at every index.",
    ),
    _fail(
        "load.ids_unique",
        "No two examples of a split have the same id.",
        "Results are kept, compared and resumed by id.",
        "Derive the id from the example's content, for instance as a hash of its question.",
    ),
    _fail(
        "load.ids_stable",
        "Ids, prompts and answers are the same in another process.",
        "Workers are separate processes, and example 7 must be the same in all of them.",
        "Seed draws with random.Random(f'{seed}/{index}'); use no hash(), set order or time.",
    ),
    _fail(
        "load.split_ids",
        "No id is in more than one split.",
        "An eval on examples that were trained on measures memorization.",
        "Split by a hash of the problem: telescope_core.SplitSource does.",
    ),
    _fail(
        "load.split_prompts",
        "No problem, prompt and answer with any hidden state, is in more than one split.",
        "A different id does not make it a different problem.",
        "Split by a hash of the problem itself: SplitSource(split_key=...).",
    ),
    _fail(
        "load.datasets",
        "Every dataset it loads by default is pinned to a commit.",
        "A branch moves, and the meaning of scores moves with it.",
        "Return the commit from dataset_revisions(), and load that one.",
    ),
)
_REWARD = (
    _fail(
        "reward.plays",
        "Rollouts with scripted answers are played to their end.",
        "A rollout that raises is lost; it does not count as a reward of 0.",
        "Catch the errors that a strange answer causes; the message names the method and line.",
    ),
    _warn(
        "reward.has_gold",
        "There is a gold answer for the examples.",
        "Without one, nobody can tell whether the maximum can be reached at all.",
        "Define gold_answer(example): a completion that earns the maximum, or one for each turn.",
    ),
    _fail(
        "reward.gold",
        "The gold answer earns the declared maximum, and counts as solved.",
        "A grader that refuses right answers trains models to be wrong.",
        "Correct the gold answer, the reward, or reward_max.",
    ),
    _fail(
        "reward.finite",
        "Every reward is a finite number.",
        "One NaN makes the whole batch NaN.",
        "Return a float for every answer; guard divisions and logarithms.",
    ),
    _fail(
        "reward.range",
        "Every reward is in the declared range.",
        "Success thresholds and normalization are computed from it.",
        "Correct the reward, or reward_min and reward_max.",
    ),
    _fail(
        "reward.floor",
        "Saying nothing earns well below the success threshold.",
        "The floor is measured; if it is close to success, there is nothing to learn.",
        "Give no reward for an empty answer.",
    ),
    _fail(
        "reward.empty",
        "Empty and blank answers stay at the floor.",
        "The shortest answer is the first hack that training finds.",
        "Return the minimum when there is no answer to judge.",
    ),
    _fail(
        "reward.echo",
        "Repeating the prompt stays at the floor.",
        "Copying is the second hack that training finds.",
        "Read the answer from its own tags only, and ask for something that is not in the prompt.",
    ),
    _fail(
        "reward.other_gold",
        "The right answer to another example stays at the floor.",
        "A grader that accepts any answer of the right form judges only the form.",
        "Compare with this example's answer.",
    ),
    _fail(
        "reward.random_words",
        "Random words stay at the floor.",
        "Whatever noise earns biases every advantage.",
        "Compare exactly; do not search for the answer anywhere in the text.",
    ),
    _fail(
        "reward.huge",
        "An answer of a million characters stays at the floor and takes at most 20 s to compute.",
        "Length must not earn reward, and one long answer must not hold up the others.",
        "Judge a bounded tail of the answer; beware of slow regular expressions.",
    ),
    _fail(
        "reward.unicode",
        "Control characters and unusual Unicode stay at the floor.",
        "Models can write every token of their vocabulary.",
        "Compare after strict parsing, and accept nothing but the exact form of an answer.",
    ),
    _fail(
        "reward.special_values",
        "nan, inf, null and the like, in the answer's form, stay at the floor.",
        "NaN is neither above nor below any number, so `abs(a - b) > tolerance` never rejects it.",
        "Reject values that are not finite after parsing.",
    ),
    _fail(
        "reward.format_only",
        "The form of an answer without any content stays near the floor.",
        "If the form earns as much as the content, models learn the form instead.",
        "Give the form at most a small part of the reward.",
    ),
    _fail(
        "reward.near_gold",
        "Numbers and formulas near the right one, but of another value, do not count as solved.",
        "A grader that takes 7 pi for 7 rewards mistakes, and evals count them as right.",
        "Compare values: telescope_core.graders.mathematics reads signs, factors, units and order.",
    ),
    _fail(
        "reward.deterministic",
        "The same answer earns the same, in repeats.",
        "Noise in the reward is noise in the gradient, and evals cannot be repeated.",
        "Seed random parts by the example, or remove them.",
    ),
    _fail(
        "reward.same_in_processes",
        "The same answer earns the same in another process.",
        "Rollouts of one group are scored in several processes.",
        "Do not depend on hash(), set order, time or the process id.",
    ),
    _fail(
        "reward.concurrency",
        "The same answers earn the same when 64 rollouts run at once.",
        "State on `self` is shared, so one rollout may be rewarded for another's answer.",
        "Keep the state of a rollout in its Episode, or in local variables.",
    ),
    _fail(
        "reward.network",
        "Rollouts need no network unless the environment declares so.",
        'network = "none" promises that it plays on machines without a network.',
        'Declare network = "always", or do not use the network.',
    ),
    _fail(
        "reward.loop",
        "Its code never blocks the event loop for more than 50 ms.",
        "All other rollouts of the worker have to wait meanwhile.",
        'Make the method sync, so that it runs in a thread, or declare @runs_in("process").',
    ),
    _fail(
        "reward.deadline",
        "A rollout ends at its deadline, and soon after it is cancelled.",
        "A rollout that cannot be stopped occupies a slot until the worker is killed.",
        "Do not catch CancelledError; give every wait a limit.",
    ),
)
_LEAKAGE = (
    _fail(
        "leakage.prompt",
        "The answer cannot be read off what the policy is shown before it answers.",
        "Training would teach the model to look it up.",
        "Remove it from the prompt, system prompt, tool descriptions and first observation.",
    ),
    _fail(
        "leakage.tool_schemas",
        "Every tool's schema is valid JSON Schema.",
        "Chat templates and constrained decoding read the schema.",
        "Correct the schema at the place that the message names.",
    ),
    _fail(
        "leakage.tool_calls",
        "Every tool can be called with arguments made from its schema.",
        "A tool that raises for arguments that its schema allows is of no use to a model.",
        "Raise ToolError for calls that cannot be carried out, or correct the schema or the tool.",
    ),
    _fail(
        "leakage.tool_errors",
        "Wrong calls are answered to the policy, and the rollout goes on.",
        "Models make mistakes, and learn from being told.",
        "Do not override the handling of calls in a way that raises.",
    ),
    _fail(
        "leakage.cleanup",
        "Cleanups work twice, and after a cancelled rollout.",
        "A deadline may interrupt a cleanup, which then runs again.",
        "Use pop(..., None) and exist_ok, and check that things exist before removing them.",
    ),
    _fail(
        "leakage.isolation",
        "A rollout begins the same whatever was played before it.",
        "What one rollout leaves behind may be a hint to the next one, or break it.",
        "Build what a rollout needs in @setup, and keep it in the Episode.",
    ),
    _warn(
        "leakage.memory",
        "A rollout that has ended is not kept in memory.",
        "Workers play millions of rollouts.",
        "Do not keep episodes or rollouts on `self` or in caches.",
    ),
)

CHECKS: dict[str, Check] = {check.id: check for check in (*_STATIC, *_LOAD, *_REWARD, *_LEAKAGE)}


def policy_digest() -> str:
    """Return a digest of what the table decides; the wording of `why` and `fix` may change."""
    table = [(check.id, check.severity, check.what) for check in CHECKS.values()]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
