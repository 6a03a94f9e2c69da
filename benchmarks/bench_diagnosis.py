"""Which faults `telescope doctor` names, how soon, and whether it accuses healthy runs.

Each run is the real loop over one live vLLM server with a model of 0.6M parameters; a fault is
planted in its tasks, its settings, or by a patch while it goes on, and the rules look at the rows
of metrics after each step. Runs are appended to a file, so that the benchmark can be taken in
pieces: python benchmarks/bench_diagnosis.py --rows FILE --models FOLDER [--only NAME ...]
With another `--seed` all cases draw, sample and begin otherwise, which makes them fresh ones.
"""

import argparse
import asyncio
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diagnosis import patches
from diagnosis.cases import FAULTS, HEALTHY, STOPS
from diagnosis.one_run import HEALTHY_STEPS, MAX_MODEL_LEN, STEPS_TO_NAME_IT, Case, Outcome, run
from machine import facts_of_run, table, write_results

from telescope_core.diagnosis import RULES
from telescope_train.inference.server import ServerSettings, running
from telescope_train.sft.config import SftConfig, SftEnvironment
from telescope_train.sft.run import run_sft

TASKS = "diagnosis.tasks"
START = {"Sums": 0.5, "Backwards": 0.2, "Vowels": 0.1, "TwoSums": 0.2}
"""What the model begins with, by its share of the warm start."""
PAGE = """# What `telescope doctor` finds

{num_named} of {num_faults} planted faults ({share:.0%}) were named within {limit} steps, by a rule
that is written beside the fault; what else was said does not count. In {num_healthy} healthy runs
there were {num_alarms} false alarms. {blind}

A fault that is planted on the way is planted after {healthy} healthy steps; steps are counted from
there. "Also" is what else was said, which mostly follows from the fault. All runs are of the real
loop on CPU with seed {seed}, a trainer of one rank, and a model of 0.6M parameters that was taught
the tasks a little before. They lack Ray and environments in processes of their own. The engine is
{engines}.

## Faults

{faults}

## Healthy runs

{runs}

## Rules that no fault of this benchmark is for

{unproved}

{{facts}}
"""


def make_models(folder: Path, seed: int) -> dict[str, Path]:
    """Return the models that runs begin with; those in `folder` are taken as they are."""
    models = {name: folder / name for name in ("start", "caller", "writer")}
    mix = {
        "start": tuple(SftEnvironment(name=f"{TASKS}:{n}", weight=w) for n, w in START.items()),
        "caller": (SftEnvironment(name=f"{TASKS}:Calls"),),
        "writer": (SftEnvironment(name=f"{TASKS}:Alphabet"),),
    }
    steps = {
        "start": {"number_of_steps": 400, "batch_size": 64, "stop_at_accuracy": 0.35},
        # Its few calls are learned by heart; the prompts that list its tool are long.
        "caller": {"number_of_steps": 200, "batch_size": 8, "stop_at_accuracy": 0.5},
        "writer": {"number_of_steps": 200, "batch_size": 16, "stop_at_accuracy": 0.5},
    }
    for name, path in models.items():
        if not path.exists():
            config = SftConfig(
                model=f"{path}-base",
                seed=seed,
                make_tiny_model=True,
                output=str(path),
                environments=mix[name],
                learning_rate=2e-3,
                gradient_checkpointing=False,
                loss_log_every=10,
                **steps[name],
            )
            run_sft(config, on_row=lambda row: print(f"step {row.step}: {row.accuracy:.2f}"))
    return models


def steps_until_named(case: Case, outcome: Outcome) -> int | None:
    """Return how many steps after it was planted the fault was named; None if it was not."""
    if STOPS in case.expects and outcome.stopped:
        return outcome.steps - case.planted_after
    steps = [
        step - case.planted_after
        for rule, step, _ in outcome.findings
        if rule in case.expects and step > case.planted_after
    ]
    return next((step for step in sorted(steps) if step <= STEPS_TO_NAME_IT), None)


def accused(case: Case, outcome: Outcome) -> list[str]:
    """Return the rules that spoke while nothing was wrong."""
    last = case.planted_after if case.expects else outcome.steps
    return [rule for rule, step, _ in outcome.findings if step <= last]


def play(
    cases: Sequence[Case],
    models: dict[str, Path],
    rows: Path,
    *,
    seed: int,
    port: int | None = None,
) -> None:
    """Play cases, and append what was found to `rows`; their metrics are in a folder beside it.

    `port`: of the vLLM server; 0 = a free one, None = an engine in this process samples.
    """
    keep = rows.with_suffix("")
    keep.mkdir(exist_ok=True)
    settings = ServerSettings(
        model_path=str(models["start"]),
        port=port or 0,
        log_path=rows.with_suffix(".server.log"),
        max_model_len=MAX_MODEL_LEN,
        takes_weights=True,
    )
    with ExitStack() as opened:
        servers = [] if port is None else [opened.enter_context(running(settings))]
        for case in cases:
            is_numbered = case.name.startswith("sums, seed")
            more_seed = int(case.name.rpartition(" ")[2]) if is_numbered else 0
            patches.CHANCE.seed(seed)
            try:
                with ExitStack() as others:
                    of_all = [] if case.vllm else servers
                    own = replace(settings, port=0, more_arguments=case.vllm)
                    asked = [*of_all] + [
                        others.enter_context(running(own))
                        for _ in range(len(of_all), case.num_servers if case.needs_servers else 0)
                    ]
                    outcome = asyncio.run(
                        run(case, asked, models[case.model], seed=seed + more_seed, keep=keep)
                    )
            except Exception:  # noqa: BLE001
                # The others are played all the same; the report says that this one is missing.
                traceback.print_exc()
                continue
            with rows.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            show(case, outcome)


def show(case: Case, outcome: Outcome) -> None:
    """Print one line of a run, and what it was accused of."""
    found = ", ".join(f"{rule} ({step})" for rule, step, _ in outcome.findings) or "nothing"
    verdict = "healthy"
    if case.expects:
        steps = steps_until_named(case, outcome)
        verdict = "NOT NAMED" if steps is None else f"named after {steps}"
    alarms = f" FALSE ALARMS {accused(case, outcome)}" if accused(case, outcome) else ""
    stopped = f" stopped: {outcome.stopped[:160]}" if outcome.stopped else ""
    print(f"{case.name}: {verdict}: {found}{stopped}{alarms} [{outcome.seconds:.0f} s]", flush=True)


def read_outcomes(rows: Path) -> dict[str, Outcome]:
    """Return the last outcome of each case."""
    outcomes = {}
    for line in rows.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        row["findings"] = tuple(tuple(one) for one in row["findings"])
        outcomes[row["case"]] = Outcome(**row)
    return outcomes


def report(rows: Path, seed: int) -> None:
    """Write the results of all cases."""
    outcomes = read_outcomes(rows)
    missing = [one.name for one in (*FAULTS, *HEALTHY) if one.name not in outcomes]
    faults, runs = ([one for one in cases if one.name in outcomes] for cases in (FAULTS, HEALTHY))
    engines = Counter(one.engine for one in outcomes.values())
    named = {case.name: steps_until_named(case, outcomes[case.name]) for case in faults}
    alarms = {case.name: accused(case, outcomes[case.name]) for case in (*faults, *runs)}
    num_named = sum(steps is not None for steps in named.values())
    unnamed = [name for name, steps in named.items() if steps is None]
    early = [name for name in named if alarms[name]]
    page = PAGE.format(
        num_named=num_named,
        num_faults=len(faults),
        share=num_named / len(faults),
        limit=STEPS_TO_NAME_IT,
        num_healthy=len(runs),
        num_alarms=sum(len(alarms[case.name]) for case in runs),
        blind=" ".join(
            [
                f"Not named: {', '.join(unnamed)}." if unnamed else "",
                f"Accused before the fault was planted: {', '.join(early)}." if early else "",
                f"Not played: {', '.join(missing)}." if missing else "",
            ]
        ).strip(),
        engines=", ".join(f"{name} in {number} runs" for name, number in engines.items()),
        healthy=HEALTHY_STEPS,
        seed=seed,
        faults=table(
            ["fault", "what it is", "named after", "by", "also"],
            [_fault_row(case, outcomes[case.name], named[case.name]) for case in faults],
        ),
        runs=table(
            ["run", "what it is", "steps", "accused of"],
            [
                [
                    case.name,
                    case.what,
                    str(outcomes[case.name].steps),
                    ", ".join(alarms[case.name]) or "nothing",
                ]
                for case in runs
            ],
        ),
        unproved=", ".join(
            f"`{rule.name}`"
            for rule in RULES
            if not any(rule.name in case.expects for case in faults)
        ),
    )
    results = [
        {
            **asdict(outcomes[case.name]),
            "expects": case.expects,
            "named_after": named.get(case.name),
        }
        for case in (*faults, *runs)
    ]
    facts = facts_of_run(
        f"python benchmarks/bench_diagnosis.py --here --seed {seed}", "torch", "transformers"
    )
    write_results("diagnosis", page, facts, results)


def _fault_row(case: Case, outcome: Outcome, named: int | None) -> list[str]:
    by = [rule for rule, _, _ in outcome.findings if rule in case.expects]
    if STOPS in case.expects and outcome.stopped:
        by.append(STOPS)
    also = sorted({rule for rule, _, _ in outcome.findings} - set(by[:1]))
    when = "**not named**" if named is None else f"{named} step{'s' * (named != 1)}"
    if STOPS in case.expects and outcome.stopped and not outcome.steps:
        when = "before the first step"
    return [case.name, case.what, when, ", ".join(by[:1]), ", ".join(also)]


def main() -> None:
    """Play, and write the results once every case was played."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="what was found so far (JSON Lines)")
    parser.add_argument("--models", type=Path, help="folder of the models; made if not there")
    parser.add_argument("--port", type=int, default=0, help="of the vLLM server; 0 = a free one")
    parser.add_argument("--here", action="store_true", help="no server: sample in this process")
    parser.add_argument("--seed", type=int, default=0, help="of models, draws and samples")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--new", action="store_true", help="only cases that are not in --rows")
    parser.add_argument("--at-most", type=int, help="number of cases of this piece")
    parser.add_argument("--report", action="store_true", help="play nothing, write the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = given.rows or Path(folder) / "rows.jsonl"
        if not given.report:
            known = set(read_outcomes(rows)) if given.new and rows.exists() else set()
            cases = [case for case in (*FAULTS, *HEALTHY) if case.name not in known]
            if given.only is not None:
                cases = [case for case in cases if case.name in given.only]
            models = make_models(given.models or Path(folder), given.seed)
            port = None if given.here else given.port
            play(cases[: given.at_most], models, rows, seed=given.seed, port=port)
        if given.only is None and given.at_most is None:
            report(rows, given.seed)


if __name__ == "__main__":
    main()
