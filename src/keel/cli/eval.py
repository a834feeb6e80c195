"""`keel eval`: measure accuracy on held-out problems, optionally against a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, bar, configuration, print_json, split
from keel.cli.launch import Nproc, launch

EVAL_HELP = """Evaluate a model, a checkpoint of a run or a configuration's model on held-out problems.

Prints pass@1 and pass@k with 95 % intervals, and the fractions of parsed answers and of truncated completions. A run or
a configuration provides its tasks (task and eval.tasks) and settings; a model needs --task. Each task's own reward
grades the answers. With --task, data.* options set the data of those tasks. A baseline gets the same problems and the
same sampling noise, so differences are paired.

Examples:

  keel eval runs/default --checkpoint best

  keel eval runs/default --baseline runs/default@start --plot retention.png

  keel eval HuggingFaceTB/SmolLM2-135M-Instruct --task arithmetic --task countdown --samples 200 --k 1,8

  keel eval ./my-model --task arithmetic:skill=sort,digits=4 --temperature 0 --json

  keel eval runs/chess --task chess_puzzles data.path=puzzles.csv data.on_broken=skip

  keel eval runs/default --nproc 2

To play whole games of chess: python -m keel.recipes.chess play.
"""


@app.command(help=EVAL_HELP, context_settings=ANY_OPTION)
def eval(
    context: typer.Context,
    args: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|RUN|CONFIG [KEY=VALUE]...", help="What to evaluate, and its options."),
    ],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of a run: best, start, warmstart or a step (default: the newest).")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]", help="Evaluate this task instead of the configured ones; repeatable."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|RUN[@WHEN]", help="Model to compare with; WHEN is start, warmstart, best or a step."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Held-out problems per task (eval.samples).")] = None,
    k: Annotated[
        str | None, typer.Option(metavar="K[,K]...", help="Values of k for pass@k, such as 1,8 (eval.k).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy, with one sample per problem.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum completion length (rollout.max_completion_length).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling noise (default: run.seed + 1).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write the data to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a bar chart with intervals to this file.")
    ] = None,
    nproc: Nproc = 1,
) -> int:
    from keel.base.files import write_atomic
    from keel.config.text import find

    if plot is not None:
        from keel.lab.plots.picture import check_picture

        check_picture(plot)
    if out is not None and not out.parent.is_dir():
        raise KeelError(f"cannot write {out}: the folder {out.parent} does not exist")
    paths, overrides = split(args)
    if len(paths) != 1:
        raise KeelError(f"keel eval takes one model, run or configuration, not {len(paths)}: {' '.join(paths)}")
    if paths[0] != "tiny" and find(Path(paths[0])).suffix in (".yaml", ".yml"):  # checked before torch is loaded
        configuration([paths[0], *(item for item in overrides if not (task and item.startswith("data.")))], notes=False)
    _check_tasks(overrides, task)
    from keel.api import evaluate, evaluated_models
    from keel.base.world import is_main_process

    flags = {"eval.samples": samples, "eval.temperature": temperature, "rollout.max_completion_length": max_tokens}
    overrides += [f"{name}={value}" for name, value in flags.items() if value is not None]
    if k is not None or temperature == 0:
        overrides.append(f"eval.k=[{k or 1}]")
    if nproc != 1:
        device = evaluated_models(paths[0], task or [], overrides, checkpoint, baseline)[0].config.model.device
        return launch(context.obj, nproc, device=device)
    with bar() as watch:
        data = evaluate(
            paths[0],
            task or [],
            overrides=overrides,
            checkpoint=checkpoint,
            baseline=baseline,
            seed=seed,
            watch=watch,
        )
    if not is_main_process():
        return 0
    if out is not None:
        write_atomic(out, json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
    if plot is not None:
        from keel.lab.plots.picture import plot_evaluation

        plot_evaluation(data, plot)
    if as_json:
        print_json(data)
        return 0
    from rich.console import Console

    from keel.lab.report.terminal import show_evaluation

    for note in data["notes"]:
        typer.echo(note)
    show_evaluation(data, Console())
    for path in filter(None, (out, plot)):
        typer.echo(f"wrote {path}")
    return 0


def _check_tasks(overrides: list[str], task: list[str] | None) -> None:
    """Refuse overrides that name tasks together with --task."""
    from keel.run.model_ref import names_tasks

    clash = next((override for override in overrides if names_tasks([override])), None)
    if clash is not None and task:
        raise KeelError(f"--task {task[0]} and {clash} both name tasks: give one of them")
