"""Options of other evaluators are answered with the option here, or with why there is none."""

import pytest
import typer
from tests.cli.echo import telescope

from telescope_cli.eval import names
from telescope_cli.eval.command import eval_command
from telescope_cli.verbs import command_of

_APP = typer.Typer()
_APP.command()(eval_command)
OURS = {option for parameter in command_of(_APP).params for option in parameter.opts}
INSPECT = """
    --limit --sample-id --sample-shuffle --epochs --epochs-reducer --max-connections --max-samples
    --max-retries --timeout --attempt-timeout --time-limit --working-limit --message-limit
    --token-limit --turn-limit --fail-on-error --no-fail-on-error --continue-on-fail
    --retry-on-error --log-dir --model-base-url --stop-seqs --top-k --frequency-penalty
    --presence-penalty --logit-bias --reasoning-tokens --effort --system-message --no-score
    --max-subprocesses --sandbox --solver --cache -T
"""
LM_EVAL = """
    --tasks --model_args --apply_chat_template --limit -L --use_cache --num_fewshot --batch_size
    --max_batch_size --gen_kwargs --output_path -o --log_samples --samples --system_instruction
    --fewshot_as_multiturn --include_path --wandb_args --hf_hub_log_args --predict_only
"""
LIGHTEVAL = "--max-samples --output-dir --save-details --push-to-hub"
VERIFIERS = """
    -m -n -r -c -o -k --num-examples --rollouts-per-example --num-rollouts --group-size
    --max-concurrent --env-args --sampling-args --api-key-var --api-base-url --save-results
    --sampling.temperature --sampling.max-tokens --select.limit --select.shuffle --client.base-url
    --taskset.id --output-dir --push
"""


@pytest.mark.parametrize("peer", [INSPECT, LM_EVAL, LIGHTEVAL, VERIFIERS])
def test_options_of_other_programs_are_answered(peer, capsys):
    for option in peer.split():
        assert option not in OURS
        assert telescope("echo_env:Echo", option, "1") == 2
        error = capsys.readouterr().err
        assert "did you mean" not in error
        assert "known:" not in error, option


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("--limit", "'--examples'"),
        ("--epochs=4", "'--rollouts'"),
        ("-n", "'--examples'"),
        ("--n", "'--rollouts'"),
        ("-k", "'--api-key-env'"),
        ("--time_limit", "'--deadline-s'"),
        ("--top-k", "'--extra-body'"),
        ("--num_fewshot", "`telescope env info NAME`"),
        ("-T", "--env.NAME VALUE"),
        ("--max_tokens", "did you mean '--max-tokens'"),
    ],
)
def test_an_answer_names_what_to_write(option, here, capsys):
    assert telescope("echo_env:Echo", option) == 2
    assert here in capsys.readouterr().err


def test_each_answer_is_an_option_of_the_command():
    assert "--examples" in OURS
    assert {here.partition(": ")[0] for here in names.HERE.values()} <= OURS
