"""Print the outcomes of `telescope eval`, and decide whether it exits with an error."""

import json
from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope_cli.eval.play import EvalOutcome
from telescope_cli.eval.view import (
    WIDTH,
    count_lines,
    first_errors,
    print_errors,
    print_result,
    result_cells,
)
from telescope_core.base.errors import TooManyFailedError
from telescope_core.base.types import JsonValue
from telescope_core.evals.folder import result_to_json
from telescope_core.records.files import plain


def show_outcomes(outcomes: Sequence[EvalOutcome], *, as_json: bool) -> None:
    """Print the result of a single eval, or one table of several."""
    if as_json:
        fields = [_to_json(one) for one in outcomes]
        if len(outcomes) == 1 and outcomes[0].result is not None:
            typer.echo(json.dumps(plain(result_to_json(outcomes[0].result)), indent=2))
        else:
            typer.echo(json.dumps(plain(fields), indent=2))
        return
    if len(outcomes) > 1:
        _print_table(outcomes)
    for one in outcomes:
        if len(outcomes) == 1 and one.result is not None:
            print_result(one.result, one.folder.path)
        if one.error is not None:
            message = f"Failed: {one.request.name}: {one.error}"
            Console(highlight=False).print(Text(message, style="yellow"), soft_wrap=True)
        if one.result is not None and one.result.num_scored:
            print_errors(first_errors(one.folder.rows()))


def require_enough(outcomes: Sequence[EvalOutcome], *, max_failed: float) -> None:
    """Raise the first error, or TooManyFailedError if more than `max_failed` of an eval failed."""
    for one in outcomes:
        if one.error is not None:
            raise one.error
    for one in outcomes:
        result = one.result
        if result is None:
            continue
        reasons = ", ".join(f"{reason} {count}" for reason, count in result.failures.items())
        if result.num_scored == 0:
            errors = first_errors(one.folder.rows())
            first = f"; the first error: {errors[0]}" if errors else ""
            raise TooManyFailedError(
                f"no rollout was scored: {result.num_failed} failed ({reasons}); their errors are "
                f"in {one.folder.path / 'rollouts.jsonl'}{first}"
            )
        if result.num_failed > max_failed * result.num_rollouts:
            raise TooManyFailedError(
                f"{one.request.name}: {result.num_failed} of {result.num_rollouts} rollouts failed "
                f"({reasons}), more than --max-failed {max_failed:g} allows, so the result may not "
                f"be trusted; repeat the command with --output {one.folder.path} --resume to play "
                "them again, or raise --max-failed"
            )


def _to_json(outcome: EvalOutcome) -> JsonValue:
    return {
        "environment": outcome.request.environment,
        "model": outcome.request.model,
        "folder": str(outcome.folder.path),
        "error": str(outcome.error) if outcome.error is not None else None,
        "result": result_to_json(outcome.result) if outcome.result is not None else None,
    }


def _print_table(outcomes: Sequence[EvalOutcome]) -> None:
    console = Console(width=WIDTH, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("environment")
    table.add_column("model")
    results = [one.result for one in outcomes if one.result is not None]
    k = min(results[0].pass_at) if results else 1
    for name in (f"pass@{k}", "95% interval", "reward", "scored"):
        table.add_column(name, justify="right")
    for one in outcomes:
        cells = result_cells(one.result, k) if one.result else ["-", "-", "-", "failed"]
        table.add_row(one.request.environment, one.request.model or "", *cells)
    console.print(table)
    for one in outcomes:
        console.print(Text(f"{one.request.name}: {one.folder.path}"), soft_wrap=True)
        for line in count_lines(one.result) if one.result is not None else ():
            console.print(f"  {line}")
