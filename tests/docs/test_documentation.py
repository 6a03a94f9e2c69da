"""Code blocks of README and docs: python is run, toml validated, commands run or accounted for.

A command stands in `HERE` and is run by this file, or in `ELSEWHERE` with the test that runs it.
"""

import ast
import asyncio
import importlib.util
import inspect
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.ports import free_port

from telescope_cli.eval.files import read_files
from telescope_cli.main import main
from telescope_core import Message, Rollout, StopReason
from telescope_core.records import RunFolder, row_of
from telescope_core.records.blocks import BlockLog
from telescope_core.records.parquet import write_rows
from telescope_core.records.timeline import (
    CALLS_FOLDER,
    TIMELINE_FOLDER,
    ModelCall,
    TimelineSpan,
)
from telescope_envs.validation import CHECKS
from telescope_train.plan.load import load_train_config
from telescope_train.sft.config import load_sft_config

ROOT = Path(__file__).parents[2]
PACKAGE_PAGES = sorted((ROOT / "packages").glob("*/README.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PACKAGE_PAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
FIRST_RUN = "tests/e2e/test_first_run.py::test_the_commands_of_the_tutorial"
AGENT = "tests/e2e/test_agent_tutorial.py::test_the_commands_of_the_tutorial"
SUMMARIES = (
    '"name": "./examples/agent.py:Numbers", "env": {"max_turns": 6, "harness_options": '
    '{"instructions": "Use the shell.", "context_strategy": "summarize", '
    '"max_context_tokens": 110}}'
)
CI = ".ci/run"
LIGHT = (
    "tests/envs/test_light_stack.py"
    "::test_an_environment_is_installed_and_a_model_behind_an_endpoint_measured"
)
LINKED = (
    "tests/envs/using/test_linked.py::test_a_link_is_used_as_it_is_in_this_process_and_in_workers"
)
ELSEWHERE_WORKER = (
    "tests/core/processes/test_workers.py::"
    "test_a_worker_elsewhere_needs_the_token_and_serves_the_next_host"
)
VALIDATE = "tests/envs/validation/test_processes.py::test_the_commands_of_the_how_to"
BUNDLE = "tests/envs/test_bundle.py::test_a_bundle_installs_with_networking_blocked"
PUBLISHING = "tests/envs/test_publishing_docs.py::test_the_commands_of_the_tutorial"
HERE = {
    "telescope env list",
    "telescope env info countdown",
    "telescope env validate packages/telescope-envs/environments/countdown --level static",
    "telescope eval --report runs/quickstart",
    "telescope eval suite.toml --dry-run",
    "telescope env list --installed",
    "telescope env search arithmetic --tag single-turn",
    "telescope env tree math-reasoning",
    "telescope sandbox list",
    "telescope env update --dry-run",
    "telescope train examples/quickstart.toml --dry-run",
    "telescope train examples/quickstart.toml --learning_rate 1e-4 --dry-run",
}
HUB_SERVER = "tests/envs/server/test_how_to.py::test_the_commands_make_a_hub_and_its_copy"
HOSTED = "tests/envs/registry/test_host_a_registry.py::"
SIMULATE = "tests/cli/test_simulate.py::"
WATCH = "tests/cli/test_watch.py::"
HARBOR = "tests/adapters/test_harbor.py::test_commands_link_and_check_a_folder"
HARBOR_PLAYED = (
    "tests/adapters/test_harbor.py::"
    "test_an_agent_plays_in_the_folder_of_the_task_and_is_graded_by_its_tests"
)
GAMES_EVAL = "tests/adapters/test_games.py::test_an_eval_plays_a_linked_environment"
THREE_NODES = (
    "tests/e2e/test_three_nodes.py::"
    "test_a_run_over_three_nodes_outlives_one_of_them_and_names_the_next"
)
EVAL_FILES = "tests/cli/test_eval_files.py::"
ELSEWHERE = {
    "telescope eval suite.toml --model my-model --temperature 0": (
        f"{EVAL_FILES}test_a_file_is_played_and_continued_as_it_is"
    ),
    "telescope eval suite.toml countdown": (
        f"{EVAL_FILES}test_environments_on_the_command_line_are_those_that_are_played"
    ),
    "telescope --install-completion": (
        "tests/cli/test_completion.py::test_it_is_set_up_with_one_command"
    ),
    "telescope env validate . --examples 2 --env.judge.base_url http://127.0.0.1:8001/v1 "
    "--env.judge.model grader": (
        "tests/envs/cli/test_validate.py::test_settings_of_the_environment_are_given_as_for_an_eval"
    ),
    "telescope eval ./nim.py:Nim --base-url http://127.0.0.1:8000/v1 "
    "--env.opponents.others.base_url http://127.0.0.1:8100/v1": (
        "tests/cli/test_eval.py::test_a_match_is_played_against_a_model_at_another_endpoint"
    ),
    "telescope env link harbor:./tasks": HARBOR,
    "telescope env link harbor:few-tasks@1.0 --settings "
    '\'{"registry": "https://example.org/registry.json"}\'': (
        "tests/adapters/test_harbor_registry.py::test_a_dataset_is_fetched_once_at_its_commit"
    ),
    "telescope env validate harbor:./tasks": HARBOR,
    "telescope eval harbor:./tasks --base-url http://127.0.0.1:8000/v1 --model m": HARBOR_PLAYED,
    "telescope env link harbor:./tasks --secret OPENAI_API_KEY": HARBOR,
    "telescope env export my-env --output tasks": (
        "tests/adapters/test_harbor.py::test_examples_of_ours_are_written_as_tasks_that_play"
    ),
    'telescope env link harbor:./tasks --settings \'{"harness": "command", '
    '"harness_options": {"argv": ["python3", "agent.py", "{task}"]}}\'': HARBOR,
    'telescope env link harbor:./tasks --settings \'{"sandbox": "local", '
    '"local_venv": "/opt/tools", "local_skips": ["pip install"]}\'': HARBOR,
    "telescope env install acme/toy@0.1.0 --registry ../moved": (
        "tests/envs/test_sync.py::test_a_registry_that_has_moved_is_named_by_installing_again"
    ),
    "telescope rescore quickstart --env ./math-reasoning": (
        "tests/cli/test_rescore.py::test_it_runs_in_a_process_of_its_own_and_tells_its_secrets"
    ),
    "telescope rescore quickstart --env ./math-reasoning --output runs/evals/mended": (
        "tests/cli/test_rescore.py::test_the_new_rewards_are_a_folder_that_evals_read"
    ),
    "telescope eval --report runs/evals/mended": (
        "tests/cli/test_rescore.py::test_the_new_rewards_are_a_folder_that_evals_read"
    ),
    "telescope train run.toml --resume --megatron_tensor_parallel_size 1": (
        "tests/e2e/test_megatron_run.py::test_a_run_goes_on_with_other_ranks"
    ),
    "export RAY_AUTH_MODE=token": THREE_NODES,
    "ray get-auth-token --generate": THREE_NODES,
    "ray start --head --port 6379": THREE_NODES,
    "ray start --address 10.0.0.1:6379": THREE_NODES,
    "telescope train run.toml --ray_address 10.0.0.1:6379": THREE_NODES,
    "telescope agent install mini-swe-agent": (
        "tests/e2e/test_harnesses.py::test_its_rollout_is_trained_on_exactly_what_was_sampled"
    ),
    "telescope eval ./mend.py:Mend --base-url http://127.0.0.1:8000/v1 --examples 1 --rollouts 4": (
        "tests/e2e/test_agents.py::test_the_agents_of_the_how_tos_are_measured"
    ),
    "telescope eval ./logs.py:Logs --base-url http://127.0.0.1:8000/v1 --examples 4 "
    "--env.harness shell-agent --env.harness_options "
    '\'{"context_strategy": "summarize", "max_context_tokens": 6000}\'': (
        "tests/train/gateway/test_compaction.py"
        "::test_the_environment_of_the_page_is_played_in_a_sandbox_and_trained_exactly"
    ),
    "telescope eval ./mend.py:Mend --env.harness mini-swe-agent "
    "--base-url http://127.0.0.1:8000/v1": (
        "tests/e2e/test_harnesses.py::test_its_rollout_is_trained_on_exactly_what_was_sampled"
    ),
    "npm install --prefix /opt/coding-agents @anthropic-ai/claude-code@2.1.332": (
        "tests/e2e/test_coding_agents.py::test_its_rollout_is_trained_on_exactly_what_was_sampled"
    ),
    "telescope eval ./coding.py:Coding --base-url http://127.0.0.1:8000/v1 "
    "--examples 1 --rollouts 4": (
        "tests/e2e/test_coding_agents.py::test_its_rollout_is_trained_on_exactly_what_was_sampled"
    ),
    "telescope sandbox check local": "tests/cli/test_sandbox.py::test_a_check_that_passes",
    "telescope env link gym:FrozenLake-v1": GAMES_EVAL,
    "telescope eval gym:FrozenLake-v1 --base-url http://127.0.0.1:8000/v1 --model m": GAMES_EVAL,
    "telescope env link verifiers:sums --with ./sums": (
        "tests/adapters/test_verifiers.py"
        "::test_a_single_turn_keeps_the_contract_with_the_rewards_of_verifiers"
    ),
    "telescope env link verifiers:rivers --with ./rivers --secret OPENAI_API_KEY "
    "--secret OPENAI_BASE_URL": (
        "tests/adapters/test_verifiers.py::test_a_judge_gets_the_key_that_the_link_names"
    ),
    'telescope env link nemo-gym:http://127.0.0.1:9001 --settings \'{"eval_data": '
    '"/gym/resources_servers/example_multi_step/data/example.jsonl"}\'': (
        "tests/adapters/test_nemo_gym.py"
        "::test_published_servers_give_the_rewards_of_their_verifiers"
    ),
    "telescope env link ors:http://127.0.0.1:8080": (
        "tests/adapters/test_ors.py::test_environments_of_the_package_keep_the_contract"
    ),
    "telescope env link inspect:tasks.py@essays --with openai --secret OPENAI_API_KEY "
    '--settings \'{"judge": "openai/gpt-5-mini"}\'': (
        "tests/adapters/test_inspect.py::test_a_judge_gets_its_key_by_the_link"
    ),
    "pip install 'telescope-adapters[openenv]'": (
        "tests/adapters/test_served_by_openenv.py::test_their_client_steps_our_environment"
    ),
    "python -m telescope_adapters.serving.openenv_server countdown --port 8000": (
        "tests/adapters/test_served_by_openenv.py::test_their_client_steps_our_environment"
    ),
    "telescope watch quickstart": f"{WATCH}test_a_person_sees_steps_losses_and_the_end",
    "telescope watch quickstart --json": f"{WATCH}test_a_program_gets_everything_as_objects",
    "telescope simulate run.toml --gpus 16 --servers 12 --parameters 8B": (
        f"{SIMULATE}test_a_run_is_estimated_with_other_divisions"
    ),
    "telescope simulate run.toml --gpus 16 --parameters 8B --max_async_rollout 0": (
        f"{SIMULATE}test_numbers_come_as_json_and_follow_the_settings"
    ),
    "telescope simulate run.toml --gpus 16 --parameters 8B --max_async_rollout 2": (
        f"{SIMULATE}test_numbers_come_as_json_and_follow_the_settings"
    ),
    "telescope simulate run.toml --gpus 16 --parameters 8B --lengths-of runs/small": (
        f"{SIMULATE}test_lengths_come_from_the_rollouts_of_a_run"
    ),
    "telescope simulate run.toml --gpus 16 --servers 12 --speeds-of runs/small "
    "--lengths-of runs/small": f"{SIMULATE}test_speeds_come_from_the_records_of_a_run",
    "telescope simulate run.toml --gpus 16 --parameters 8B --mean-length 300 --spread 0.8 "
    "--turns 2-40 --tool-seconds 2": f"{SIMULATE}test_agents_with_tools_are_estimated",
    "telescope eval countdown --base-url https://models.example.com/v1 --model big-model "
    "--api-key-env BIG_KEY": (
        "tests/cli/test_eval_endpoint.py::"
        "test_a_key_that_is_refused_ends_at_once_and_names_its_variable"
    ),
    "pip install 'telescope-cli[ui]'": "scripts/install_stack.sh",
    "telescope ui": (
        "tests/cli/test_ui.py::test_it_says_where_it_is_and_ends_when_it_is_interrupted"
    ),
    "telescope ui runs/quickstart": (
        "tests/cli/test_ui.py::test_it_says_where_it_is_and_ends_when_it_is_interrupted"
    ),
    "telescope ui runs/quickstart --port 8123 --no-open": (
        "tests/cli/test_ui.py::test_it_says_where_it_is_and_ends_when_it_is_interrupted"
    ),
    "telescope ui runs/quickstart --export quickstart-page": (
        "tests/cli/test_ui.py::test_an_export_has_every_page_as_a_script"
    ),
    "telescope ui runs/quickstart --export quickstart.html --one-file": (
        "tests/cli/test_ui.py::test_one_file_has_the_pages_that_a_folder_has_and_loads_nothing"
    ),
    "telescope hub check registry": "Makefile",
    "telescope hub check registry --against origin/main": (
        f"{HOSTED}test_a_folder_is_checked_rendered_and_served"
    ),
    "telescope hub render registry public": f"{HOSTED}test_a_folder_is_checked_rendered_and_served",
    "hf upload acme/environments registry . --repo-type dataset --private": (
        f"{HOSTED}test_an_upload_makes_a_registry_on_the_hub"
    ),
    "telescope hub login --registry corp < token.txt": (
        "tests/envs/test_credentials.py::test_login_and_logout"
    ),
    "telescope hub logout --registry corp": "tests/envs/test_credentials.py::test_login_and_logout",
    "telescope hub namespace add acme --data hub-data": HUB_SERVER,
    "telescope hub token create ci-of-acme --namespace acme --days 90 --data hub-data": HUB_SERVER,
    "telescope hub serve --data hub-data --port 8470": HUB_SERVER,
    "telescope hub serve --data hub-data --port 8470 --trust-proxy 127.0.0.1 "
    "--public-address https://hub.example.org": HUB_SERVER,
    "telescope hub alias add toy acme/toy --data hub-data": HUB_SERVER,
    "telescope hub token list --data hub-data": HUB_SERVER,
    "telescope hub token revoke 1f0c2a9b --data hub-data": HUB_SERVER,
    "telescope hub namespace publishers acme --publisher "
    'repository:acme/environments,workflow=environment.yml --reason "CI moved" '
    "--data hub-data": HUB_SERVER,
    'telescope hub namespace suspend acme --reason "stolen token" --data hub-data': HUB_SERVER,
    'telescope hub namespace restore acme --reason "new tokens" --data hub-data': HUB_SERVER,
    "telescope hub audit --data hub-data": HUB_SERVER,
    "mkdir -p backup": HUB_SERVER,
    "python -c \"import sqlite3; sqlite3.connect('hub-data/hub.sqlite3').execute("
    "'VACUUM INTO \\'backup/hub.sqlite3\\'')\"": HUB_SERVER,
    "cp -r hub-data/artifacts hub-data/reserved.txt backup/": HUB_SERVER,
    "make setup": CI,
    "make setup-gpu": "scripts/check_constraints.py",
    "make setup-light": "tests/arch/test_setup.py",
    "telescope env install countdown": LIGHT,
    "telescope eval countdown --base-url http://127.0.0.1:8000/v1 --examples 64": LIGHT,
    "make check": CI,
    "make test": CI,
    "make test-fast": CI,
    "telescope env link ./my-env": LINKED,
    "telescope env uninstall my-env": LINKED,
    "telescope env update math-reasoning": (
        "tests/envs/using/test_update.py::test_updating_installs_and_locks_the_newer_one"
    ),
    "telescope env verify": (
        "tests/envs/using/test_verify.py::test_a_tampered_file_of_an_installed_environment_is_found"
    ),
    "make quickstart": "scripts/quickstart.sh",
    "make tutorial": "scripts/tutorial.sh",
    "make agent-tutorial": "scripts/agent_tutorial.sh",
    "python examples/agent.py runs/agent-demonstrations.jsonl": AGENT,
    "telescope sft examples/agent-sft.toml": AGENT,
    "telescope train examples/agent.toml": AGENT,
    "telescope doctor runs/agent": AGENT,
    "telescope train examples/agent.toml --name agent-slower --learning_rate 2e-4 "
    "--prompts_batch_size_for_trainer 16": AGENT,
    "python examples/agent.py runs/agent-summaries.jsonl summarize": AGENT,
    "telescope sft examples/agent-sft.toml --dataset runs/agent-summaries.jsonl "
    "--output runs/agent-summaries-start --stop_at_accuracy 0.58": AGENT,
    "telescope train examples/agent.toml --model runs/agent-summaries-start "
    "--name agent-summaries --max_model_len 768 --branch_credit outcome "
    f"--environments '[{{{SUMMARIES}}}]' "
    '--evals \'[{"name": "./examples/agent.py:Numbers", "num_samples": 64, "rollouts": 2, '
    f'"pass_k": [1, 2], "max_tokens": 64, {SUMMARIES.partition(", ")[2]}}}]\'': AGENT,
    "telescope train examples/smollm2.toml --model runs/smollm2-start": "scripts/tutorial.sh",
    'export PATH="$PWD/.venv/bin:$PATH"': "scripts/walkthrough.sh",
    "telescope env install math-reasoning countdown": "Makefile",
    "telescope env install reasoning-gym --allow-sdist cellpylib,pycosat,zss": (
        "tests/envs/attacks/test_install_dependencies.py"
        "::test_a_source_distribution_is_refused_where_wheels_are_required"
    ),
    "telescope env sync --locked": (
        "tests/envs/test_sync.py::test_a_lock_is_reproduced_on_another_machine"
    ),
    "telescope env sync --locked --reinstall": (
        "tests/envs/attacks/test_install_dependencies.py"
        "::test_reinstalling_brings_back_the_files_that_the_lock_names"
    ),
    "telescope env bundle -o environments.zip": BUNDLE,
    "telescope env install --from-bundle environments.zip": BUNDLE,
    "telescope env sync --locked --offline": BUNDLE,
    "telescope env install math-reasoning": (
        "tests/envs/test_isolated.py::test_an_isolated_environment_plays_in_its_own_interpreter"
    ),
    "telescope env check-grader math-datasets --examples 4": (
        "tests/envs/cli/test_check_grader.py::test_a_grader_that_reads_values_passes"
    ),
    "telescope env validate my-env": VALIDATE,
    "telescope env validate my-env --report report.md": VALIDATE,
    "export TELESCOPE_WORKER_TOKEN=\"$(python -c 'import secrets; "
    "print(secrets.token_urlsafe())')\"": ELSEWHERE_WORKER,
    "python -m telescope_core.processes.worker countdown --listen 0.0.0.0:7000": ELSEWHERE_WORKER,
    "telescope sft examples/sft.toml": FIRST_RUN,
    "telescope sft examples/sft.toml --dry-run": (
        "tests/cli/test_sft.py::test_a_dry_run_shows_what_is_learned_and_starts_nothing"
    ),
    "telescope sft chat.toml --dataset conversations.jsonl --too_long truncate": (
        "tests/cli/test_sft.py::test_a_dataset_is_learnt_and_what_was_cut_is_said"
    ),
    "telescope train examples/quickstart.toml": FIRST_RUN,
    "telescope train run.toml": FIRST_RUN,
    "telescope train run.toml --dry-run": FIRST_RUN,
    "telescope train examples/mixed.toml --model ./my-model": (
        "tests/e2e/test_environments.py::test_a_mix_is_trained_on_exactly_what_the_server_sampled"
    ),
    "telescope export runs/quickstart --steps 20,40 --dtype bfloat16 --output exports": (
        "tests/cli/test_export.py::test_several_at_once_sharded_and_narrow"
    ),
    "telescope export runs/quickstart --push my-name/my-model --private": (
        "tests/cli/test_export.py::test_push_uploads_one_commit"
    ),
    "telescope train examples/quickstart.toml --resume": (
        "tests/e2e/test_resumed_run.py::test_a_run_that_is_stopped_twice_goes_on_and_ends"
    ),
    "telescope train examples/quickstart.toml --name synchronous --max_async_rollout 0": (
        "tests/e2e/test_synchronous_run.py::test_two_ranks_train_synchronously"
    ),
    "telescope eval compare runs/evals/base runs/evals/trained": (
        "tests/cli/test_eval.py::test_two_evals_are_compared_by_example"
    ),
    "telescope eval math-reasoning --model runs/quickstart/checkpoints/final/hf --env.level digit "
    "--env.operations + --env.instruction= --max-tokens 12 --examples 200 --rollouts 4 --k 1,4": (
        FIRST_RUN
    ),
    "telescope eval math-reasoning --model ./my-model --examples 64 --rollouts 8 --k 1,4": (
        FIRST_RUN
    ),
    "telescope eval countdown --base-url http://127.0.0.1:8000/v1 --examples 64 --rollouts 8 "
    "--k 1,4": "tests/cli/test_eval.py::test_eval_prints_a_table_and_writes_results",
    "telescope eval ./signs.py:Signs --model a-model-that-sees "
    "--base-url https://models.example/v1": (
        "tests/cli/test_eval_endpoint.py::test_the_environment_of_the_page_on_pictures"
    ),
    "telescope eval ./sums.py:Sums --base-url http://127.0.0.1:8000/v1 --examples 4 "
    "--rollouts 2": "tests/e2e/test_agents.py::test_the_agents_of_the_how_tos_are_measured",
    "telescope eval ./reverse.py:Reverse --base-url http://127.0.0.1:8000/v1 --env.num_letters 3": (
        "tests/cli/test_eval.py::test_json_is_alone_on_stdout_and_env_flags_reach_the_environment"
    ),
    "telescope env init acme/sort-words --template single-turn": PUBLISHING,
    "cd sort-words && python -m pytest": PUBLISHING,
    "perl -pi -e 's/ = 5$/ = 6/' src/telescope_env_acme_sort_words/environment.py": PUBLISHING,
    "telescope env validate .": PUBLISHING,
    'git init -q && git add . && git commit -q -m "First version"': PUBLISHING,
    "telescope hub init ../registry --owner acme": PUBLISHING,
    "telescope env push --registry ../registry --dry-run": PUBLISHING,
    "telescope env push --registry ../registry --yes": PUBLISHING,
    "telescope env install acme/sort-words --registry ../registry --no-lock": PUBLISHING,
    "telescope env info acme/sort-words --registry ../registry": PUBLISHING,
    "telescope env push --registry ../registry --bump minor --commit --yes": PUBLISHING,
    'telescope env yank acme/sort-words@0.1.0 --reason "too easy" --registry ../registry': (
        PUBLISHING
    ),
}
"""Command -> the test or script that runs it, at another size where it would be slow."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    info: str
    code: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]


@cache
def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = str(page.relative_to(ROOT))
            found.append(Block(page=name, line=line, info=match[1].strip(), code=match[2]))
    return found


def commands() -> set[str]:
    shell = [block.code for block in blocks() if block.language == "sh"]
    return {line.strip() for code in shell for line in code.splitlines() if line.strip()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small run in it, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = RunFolder.create(Path("runs/quickstart"), config={"run": {"name": "quickstart"}})
    for step in (1, 2):
        rollouts = [
            Rollout(
                environment="countdown",
                example_id="e",
                group_id=f"{step}.0",
                index=index,
                messages=(Message(role="user", content="1 2=3"),),
                stop_reason=StopReason.COMPLETED,
                reward=float(index),
            )
            for index in range(2)
        ]
        run.write_rollouts(
            step, [row_of(rollout, step=step, with_tokens=True) for rollout in rollouts]
        )
        run.log_metrics({"step": step, "reward/mean": 0.5})
    with BlockLog(run.path / TIMELINE_FOLDER, TimelineSpan) as spans:
        spans.add(TimelineSpan(time_s=1.0, duration_s=0.5, name="forward", source="rank 0"))
    with BlockLog(run.path / CALLS_FOLDER, ModelCall) as calls:
        calls.add(ModelCall(time_s=1.0, duration_s=0.5, server="http://127.0.0.1:8100"))
    run.finish()
    return tmp_path


def test_every_block_has_a_language_that_is_checked():
    known = {"python", "sh", "toml", "text"}
    assert [f"{b.page}:{b.line}" for b in blocks() if b.language not in known] == []


PYTHON_PAGES = [page for page in PAGES if "\n```python" in page.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, place):
    namespace: dict[str, object] = {"__name__": "documentation"}
    own = [b for b in blocks() if b.page == str(page.relative_to(ROOT)) and b.language == "python"]
    assert own
    with asyncio.Runner() as runner:
        for block in own:
            title = re.search(r'title="([^"]+)"', block.info)
            if title:
                (place / title[1]).write_text(block.code, encoding="utf-8")
            source = "\n" * block.line + block.code
            # As cells of a notebook, which may await.
            code = compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            going_on = eval(code, namespace)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(going_on)
    sys.modules.pop("reverse", None)


@pytest.mark.slow
def test_toml_blocks_are_valid_settings(tmp_path):
    path, base = tmp_path / "block.toml", tmp_path / "base.toml"
    base.write_text(
        'name = "docs"\nnumber_of_steps = 1\nmodel = "a/b"\n[[environments]]\nname = "countdown"\n'
    )
    wrong = []
    for block in blocks():
        if block.language == "toml":
            path.write_text(block.code, encoding="utf-8")
            try:
                if block.info == "toml sft":
                    load_sft_config([path])
                elif block.info == "toml eval":
                    assert read_files([path], is_folder=False).evals
                else:
                    load_train_config([base, path], [])
                    assert tomllib.loads(block.code)
            except (ValueError, AssertionError) as error:
                wrong.append(f"{block.page}:{block.line}: {error}")
    assert wrong == []


def test_every_command_is_run_somewhere():
    assert commands() - HERE - set(ELSEWHERE) == set()
    assert (HERE | set(ELSEWHERE)) - commands() == set()


def test_what_runs_a_command_exists():
    for where in set(ELSEWHERE.values()):
        path, _, function = where.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, where


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(HERE))
def test_cheap_commands_work_as_written(command, place, monkeypatch, capsys):
    words = shlex.split(command)[1:]
    if words[0] == "train":
        from telescope_train.models.tiny import make_tiny_model  # torch takes seconds

        (place / "examples").symlink_to(ROOT / "examples")
        make_tiny_model(place / "runs" / "quickstart-start", seed=0)
        words += ["--inference_base_port", str(free_port()), "--name", "other"]
    elif "suite.toml" in words:
        (suite,) = (block.code for block in blocks() if block.info == "toml eval")
        (place / "suite.toml").write_text(suite, encoding="utf-8")
    elif words[0] == "env":
        monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(words)
    output = capsys.readouterr()
    assert not ended.value.code, output.out + output.err
    assert output.out.strip()


def test_links_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_is_in_the_index():
    """Pages of a folder with an index of its own are in that one."""
    for index in sorted((ROOT / "docs").rglob("README.md")):
        below = set(index.parent.rglob("*.md")) - {index}
        others = {page.parent for page in below if page.name == "README.md"}
        expected = {page for page in below if page.name == "README.md" or page.parent not in others}
        linked = {index.parent / target for target in LINK.findall(index.read_text())}
        assert expected - linked == set()


def test_a_cell_of_a_table_is_no_paragraph():
    """Names in code do not count: some cells are lists of them."""
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(words)} words: {' '.join(words[:6])} ..."
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for cell in (line.split("|") if line.startswith("|") else ())
        if len(words := re.sub(r"`[^`]*`,?", "", cell).split()) >= 50
    ]
    assert long == []


def test_the_journey_of_a_token_goes_through_functions_that_are_there():
    page = ROOT / "docs" / "explanation" / "how-the-code-is-laid-out.md"
    text = page.read_text(encoding="utf-8").partition("## The journey of one token")[2]
    stations = re.findall(r"\]\(([^)]+\.py)\)`? `(\w+)`", text)
    assert len(stations) > 15
    for target, name in stations:
        source = (page.parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async def|def|class) {name}\b", source, re.MULTILINE), target


def test_the_readme_of_a_package_stands_alone_on_a_package_index():
    """Relative links lead nowhere there."""
    for page in PACKAGE_PAGES:
        assert LINK.findall(page.read_text(encoding="utf-8")) == [], page.parent.name


def test_checks_are_counted_right():
    for path in (ROOT / "README.md", ROOT / "packages/telescope-envs/README.md"):
        assert f"`telescope env validate` runs {len(CHECKS)} checks" in path.read_text()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.parametrize(
    "name",
    [
        *("write_code_layout", "write_config_reference"),
        *("write_sizing_table", "write_validation_reference"),
    ],
)
def test_the_written_reference_is_current(name):
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.reference(), f"run {path.name}"


def test_the_reference_of_run_folders_names_every_column(tmp_path):
    text = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    fields = row_of(Rollout(environment="e", example_id="", group_id="", index=0)).__slots__
    assert [name for name in fields if f"`{name}`" not in text] == []
    write_rows(tmp_path / "rows.parquet", [])
    columns = pyarrow.parquet.read_schema(tmp_path / "rows.parquet").names
    assert [name for name in columns if f"`{name}`" not in text] == []
