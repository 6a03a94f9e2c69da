"""The table of checks: what each proves, why it matters, its severity, and the fix.

Reports name `POLICY_VERSION`, so the meaning of a version is fixed. A change to the table needs a
new version and a new line in tests/envs/validation/policies.json.
"""

from dataclasses import dataclass

from telescope_envs.validation.records import Level, Severity

POLICY_VERSION = "7"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its id, why it matters, how to pass it, and its severity."""

    id: str
    """The level and the name of the check, such as `static.wheel`."""
    what: str
    """The statement that is true if it passes."""
    why: str
    fix: str
    severity: Severity = Severity.FAIL

    @property
    def level(self) -> Level:
        """The level of the check, which is the first part of its id."""
        return Level(self.id.partition(".")[0])


_STATIC = (
    Check(
        "static.project",
        "pyproject.toml has [project] and [build-system], and the project builds into one wheel.",
        "The wheel is what gets published.",
        "Correct what the message says; `telescope env init` writes a pyproject.toml that works.",
    ),
    Check(
        "static.wheel",
        "The wheel has at most 50 MiB: one pure Python package, its metadata, one entry point.",
        "Start-up hooks and scripts would run outside the environment; data belongs in a dataset.",
        "Remove from the wheel what the message names.",
    ),
    Check(
        "static.name",
        "The distribution is telescope-env-<owner>-<name>, with a plain PEP 440 version.",
        "No owner may impersonate another, and two spellings of a version would be two releases.",
        "Rename the distribution and its package; write the version as the message shows it.",
    ),
    Check(
        "static.metadata",
        "There are a description, an SPDX license, and a requires-python that allows this Python.",
        "People find it by the first, may use it by the second, and can run it by the third.",
        'Set them in [project], for instance license = "Apache-2.0", requires-python = ">=3.11".',
    ),
    Check(
        "static.readme",
        "There is a README that says what the environment is.",
        "Nobody can judge a reward without knowing what it is given for.",
        "Describe the task, what earns the reward, and the settings; set readme in [project].",
    ),
    Check(
        "static.dependencies",
        "They are packages of the package index, among them this telescope-core; no environments.",
        "URLs change and vanish, anybody may own a name there, and the protocol comes with core.",
        'Add "telescope-core>=0.1,<0.2"; publish on the index what else is needed, or copy it.',
    ),
    Check(
        "static.secrets",
        "No file holds a token of a known form or a private key.",
        "A release cannot be taken back: whoever downloaded it has the secret.",
        "Revoke the secret now, remove it from the file, and declare its name in `secrets`.",
    ),
    Check(
        "static.datasets",
        "Every dataset in datasets.json is pinned to a commit.",
        "A branch moves, and the meaning of scores moves with it.",
        "Put the commit's 40 hexadecimal digits into revision.",
    ),
)
_LOAD = (
    Check(
        "load.requirements",
        "What the environment depends on is installed, or can be.",
        "Its code cannot run without its dependencies.",
        "Correct the dependency that the message names; one without a wheel needs --allow-sdist.",
    ),
    Check(
        "load.import",
        "The module can be imported and its entry point is an Environment class.",
        "Everybody who installs the environment imports it.",
        "Correct the error; import optional packages where they are used.",
    ),
    Check(
        "load.import_time",
        "Importing it computes for at most 2 seconds, or for the same work on a slower machine.",
        "Every worker process imports it before its first rollout.",
        "Import heavy packages in the methods that use them.",
    ),
    Check(
        "load.writes",
        "Importing, building it and reading examples write nothing outside its caches.",
        "It could not run on read-only machines, and would silently change files on others.",
        "Write below XDG_CACHE_HOME or a temporary folder, and not at import.",
    ),
    Check(
        "load.settings",
        "It can be built from its default settings, and the schema of its settings is valid.",
        "`telescope eval NAME` runs it with nothing but defaults.",
        "Give every setting a default that works.",
    ),
    Check(
        "load.tools",
        "Its tools can be turned into schemas.",
        "A tool without a schema cannot be offered to a model.",
        "Give the tool a docstring and every parameter a type that JSON can express.",
    ),
    Check(
        "load.declarations",
        "Reward range, success threshold, network and secrets make sense together.",
        "pass@k, advantages and sandboxes depend on them.",
        "Declare reward_min < reward_max and a success_threshold between them.",
    ),
    Check(
        "load.network",
        "It needs no network unless it declares so, and importing it never does.",
        'network = "none" promises that it runs, and can be listed, without a network.',
        'Load data in examples(); declare network = "load" or "always" if it needs that.',
    ),
    Check(
        "load.examples",
        "The examples of every split can be read.",
        "Training would stop at the first example that cannot be read.",
        "Correct examples(): at least one example, and an id and a prompt at every index.",
    ),
    Check(
        "load.ids",
        "No two examples of a split have one id; ids, prompts, answers are equal in all processes.",
        "Results are kept, compared and resumed by id, in several processes.",
        "Derive ids and seeds from the content; use no hash(), set order or time.",
    ),
    Check(
        "load.splits",
        "No id and no problem, prompt and answer with hidden state, is in more than one split.",
        "An eval on examples that were trained on measures memorization.",
        "Split by a hash of the problem: telescope_core.SplitSource(split_key=...) does.",
    ),
    Check(
        "load.datasets",
        "Every dataset it loads by default is pinned to a commit.",
        "A branch moves, and the meaning of scores moves with it.",
        "Return the commit from dataset_revisions(), and load that one.",
    ),
)
_REWARD = (
    Check(
        "reward.plays",
        "Rollouts with scripted answers are played to their end.",
        "A rollout that raises is lost; it does not count as a reward of 0.",
        "Catch the errors that a strange answer causes; the message names the method and line.",
    ),
    Check(
        "reward.has_gold",
        "There is a gold answer for the examples.",
        "Without one, nobody can tell whether the maximum can be reached at all.",
        "Define gold_answer(example): a completion that earns the maximum, or one for each turn.",
        Severity.WARN,
    ),
    Check(
        "reward.gold",
        "The gold answer earns the declared maximum, and counts as solved.",
        "A grader that refuses right answers trains models to be wrong.",
        "Correct the gold answer, the reward, or reward_max.",
    ),
    Check(
        "reward.range",
        "Every reward is a finite number in the declared range.",
        "One NaN makes the whole batch NaN, and success is computed from the range.",
        "Guard divisions and logarithms; correct the reward, or reward_min and reward_max.",
    ),
    Check(
        "reward.floor",
        "Saying nothing earns well below the success threshold.",
        "The floor is measured; if it is close to success, there is nothing to learn.",
        "Give no reward for an empty answer.",
    ),
    Check(
        "reward.empty",
        "Empty and blank answers stay at the floor.",
        "The shortest answer is the first hack that training finds.",
        "Return the minimum when there is no answer to judge.",
    ),
    Check(
        "reward.echo",
        "Repeating the prompt stays at the floor.",
        "Copying is the second hack that training finds.",
        "Read the answer from its own tags only, and ask for something that is not in the prompt.",
    ),
    Check(
        "reward.other_gold",
        "The right answer to another example stays at the floor.",
        "A grader that accepts any answer of the right form judges only the form.",
        "Compare with this example's answer.",
    ),
    Check(
        "reward.random_words",
        "Random words, and refusals such as `I don't know.`, stay at the floor.",
        "Whatever noise earns biases every advantage, and refusing is easily learned.",
        "Compare exactly; do not search for the answer anywhere in the text.",
    ),
    Check(
        "reward.huge",
        "An answer of a million characters stays at the floor and takes at most 20 s to compute.",
        "Length must not earn reward, and one long answer must not hold up the others.",
        "Judge a bounded tail of the answer; beware of slow regular expressions.",
    ),
    Check(
        "reward.unicode",
        "Control characters and unusual Unicode stay at the floor.",
        "Models can write every token of their vocabulary.",
        "Compare after strict parsing, and accept nothing but the exact form of an answer.",
    ),
    Check(
        "reward.special_values",
        "nan, inf, null and the like, in the answer's form, stay at the floor.",
        "NaN is neither above nor below any number, so `abs(a - b) > tolerance` never rejects it.",
        "Reject values that are not finite after parsing.",
    ),
    Check(
        "reward.format_only",
        "The form of an answer without any content stays near the floor.",
        "If the form earns as much as the content, models learn the form instead.",
        "Give the form at most a small part of the reward.",
    ),
    Check(
        "reward.near_gold",
        "Numbers, formulas and words near the right one do not count as solved.",
        "A grader that takes 7 pi for 7, or the letters of a word in any order, rewards mistakes.",
        "Compare values: telescope_core.graders.mathematics reads signs, factors, units and order.",
    ),
    Check(
        "reward.deterministic",
        "The same answer earns the same, in repeats and in another process.",
        "Noise in the reward is noise in the gradient, and groups are scored in several processes.",
        "Seed random parts by the example; do not depend on hash(), set order, time or process.",
    ),
    Check(
        "reward.concurrency",
        "The same answers earn the same when 64 rollouts run at once.",
        "State on `self` is shared, so one rollout may be rewarded for another's answer.",
        "Keep the state of a rollout in its Episode, or in local variables.",
    ),
    Check(
        "reward.network",
        "Rollouts need no network unless the environment declares so.",
        'network = "none" promises that it plays on machines without a network.',
        'Declare network = "always", or do not use the network.',
    ),
    Check(
        "reward.loop",
        "Its code never blocks the event loop for more than 50 ms.",
        "All other rollouts of the worker have to wait meanwhile.",
        'Make the method sync, so that it runs in a thread, or declare @runs_in("process").',
    ),
    Check(
        "reward.deadline",
        "A rollout ends at its deadline, and soon after it is cancelled.",
        "A rollout that cannot be stopped occupies a slot until the worker is killed.",
        "Do not catch CancelledError; give every wait a limit.",
    ),
)
_LEAKAGE = (
    Check(
        "leakage.prompt",
        "The answer cannot be read off what the policy is shown before it answers.",
        "Training would teach the model to look it up.",
        "Remove it from the prompt, system prompt, tool descriptions and first observation.",
    ),
    Check(
        "leakage.tools",
        "Every tool has a valid JSON Schema, takes arguments made from it, and answers wrong ones.",
        "Chat templates read the schema, and models make mistakes and learn from being told.",
        "Correct the schema or the tool that the message names; raise ToolError to refuse a call.",
    ),
    Check(
        "leakage.cleanup",
        "Cleanups work twice, and after a cancelled rollout.",
        "A deadline may interrupt a cleanup, which then runs again.",
        "Use pop(..., None) and exist_ok, and check that things exist before removing them.",
    ),
    Check(
        "leakage.isolation",
        "A rollout begins the same whatever was played before it.",
        "What one rollout leaves behind may be a hint to the next one, or break it.",
        "Build what a rollout needs in @setup, and keep it in the Episode.",
    ),
    Check(
        "leakage.memory",
        "A rollout that has ended is not kept in memory.",
        "Workers play millions of rollouts.",
        "Do not keep episodes or rollouts on `self` or in caches.",
        Severity.WARN,
    ),
)

CHECKS: dict[str, Check] = {check.id: check for check in (*_STATIC, *_LOAD, *_REWARD, *_LEAKAGE)}
