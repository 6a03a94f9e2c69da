"""Options of other programs that evaluate: each with its option here, or with why there is none.

They are those of inspect-ai, lm-eval, lighteval and verifiers, and of `[[evals]]` in a run.
"""

from telescope_core.base.errors import ConfigError

_HERE = {
    "--limit --max-examples --num-examples --num-samples --select.limit -n -L": "--examples",
    "--samples": "--examples: such as 0-9,20",
    "--max-samples": "--examples: or --concurrency, if those at the same time are meant",
    "--sample-id --select.include.ids": "--example: once for each id",
    "--sample-shuffle --select.shuffle --select.seed": "--shuffle: with the seed of the order",
    """
        --epochs --rollouts-per-example --num-rollouts --group-size --num-generations --n -r
        --num-return-sequences
    """: "--rollouts",
    "--epochs-reducer --pass-k --pass-at-k": "--k: pass@k and pass^k, beside the mean reward",
    "--max-connections --max-concurrent --num-concurrent -c": "--concurrency: in rollouts",
    "--batch-size --max-batch-size": "--concurrency: in rollouts; the server batches requests",
    "--max-new-tokens --max-gen-toks --max-completion-tokens --sampling.max-tokens": "--max-tokens",
    "--sampling.temperature": "--temperature",
    "--stop-seqs --stop-sequences --until": "--stop: once for each text",
    "--effort": "--reasoning-effort",
    "--time-limit --working-limit --timeout --attempt-timeout": "--deadline-s: of a whole rollout",
    "--log-dir --output-path --output-dir --results-path -o": "--output",
    "--save-results --log-samples --save-details": "--output: which has every rollout anyway",
    "--resume-from --use-cache --cache --retry-on-error": (
        "--resume: plays what is missing or failed in --output"
    ),
    "--fail-on-error --no-fail-on-error --continue-on-fail": "--max-failed: a share of rollouts",
    "--model-base-url --api-base-url --client.base-url": "--base-url",
    "--api-key-var --api-key --client.api-key-var -k": (
        "--api-key-env: the name of the variable that holds the key"
    ),
    "--model-name --model-args --pretrained -m": "--model: a folder, or a name at --base-url",
    "--num-workers --max-subprocesses": "--env-workers",
    """
        --top-k --min-p --presence-penalty --frequency-penalty --repetition-penalty --logit-bias
        --sampling-args --gen-kwargs --reasoning-tokens
    """: "--extra-body: fields of each request, such as '{\"top_k\": 20}'",
    "--apply-chat-template --custom-chat-template": "--chat-template: the model's own by default",
}
_NONE = {
    "--tasks --task --taskset.id --env-id --include-path": (
        "environments are named without an option, as in `telescope eval math-reasoning`"
    ),
    """
        --num-fewshot --system-message --system-instruction --system-prompt --fewshot-as-multiturn
        --message-limit --turn-limit --max-turns --token-limit --sandbox --solver
    """: "it belongs to the environment; `telescope env info NAME` lists its settings",
    "--max-retries --retry-attempts": (
        "requests and rollouts that fail for a passing reason are tried again anyway"
    ),
    "--no-score --predict-only": (
        "rollouts are graded as they end; `telescope rescore` grades recorded ones again"
    ),
    "--env-args --task-config -T": "settings of an environment are written --env.NAME VALUE",
    "--push --push-to-hub --save-to-hf-hub --hf-hub-log-args --wandb-args": (
        "results are the files in --output, and are sent nowhere"
    ),
}
HERE = {name: here for names, here in _HERE.items() for name in names.split()}
"""Option of another program -> option here; a remark may follow after a colon."""
REASONS = {name: why for names, why in _NONE.items() for name in names.split()}
"""Option of another program -> why there is none like it here."""


def check_other_name(flag: str) -> None:
    """Raise a ConfigError if `flag` is an option of another program."""
    name = flag.replace("_", "-")
    if name in REASONS:
        raise ConfigError(f"there is no option {flag} here: {REASONS[name]}")
    if name in HERE:
        here, _, note = HERE[name].partition(": ")
        remark = f": {note}" if note else ""
        raise ConfigError(f"unknown option {flag!r}; here it is called {here!r}{remark}")
