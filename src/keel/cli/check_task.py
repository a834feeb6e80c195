"""`keel check-task`: check a task and its rewards, and show three examples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, print_json, split

CHECK_TASK_HELP = """Check a task's problems, answers and rewards before training, and show three examples.

Checks: gold answers earn the full reward; wrong and empty answers earn less; rewards are finite; the same seed gives
the same problems; no held-out problem is trained on; the tokenizer reproduces prompts and answers. The rewards of a
configuration are checked too. Exit status: 0 all checks pass, 1 a check fails, 2 the checks could not run.

Then the rewards are tested with answers that do not solve the problem: empty answers, the format alone, copies of the
prompt, every answer at once, very long texts, tool calls without an answer. An attack that earns as much as the gold
answer fails the check. An attack that earns at least a quarter of that is a warning. See docs/rewards.md.

NAME is a task, module:attr, a YAML file or a run folder. Write the task's parameters as key=value and other options
with their section, such as data.path=mine.jsonl.

Examples:

  keel check-task arithmetic skill=sort digits=6

  keel check-task reasoning_gym dataset=chain_sum max_terms=4

  keel check-task mytasks:riddles --model Qwen/Qwen2.5-0.5B-Instruct

  keel check-task configs/default.yaml rewards='[{name: exact}, {name: length, weight: 0.1}]'
"""


@app.command(name="check-task", help=CHECK_TASK_HELP, context_settings=ANY_OPTION)
def check_task(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A task, module:attr, a YAML file or a run folder.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Parameters and options.")] = None,
    model: Annotated[str | None, typer.Option(help="Use this model's tokenizer (default: tiny).")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Number of training and of held-out problems.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
) -> int:
    config, from_file = _configuration(name, args or [])
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": model})})

    from keel.envs.exploits import MAX_REQUESTS, TIME_LIMIT_S, exploit
    from keel.envs.rewards import probe_rewards
    from keel.envs.validity import EXAMPLES, MAX_REMOTE, examples, prove
    from keel.models.load import load_tokenizer
    from keel.run.parts import build_judge, build_named_task, build_renderer

    task = build_named_task(config.task, config)
    configured = [part.name for part in config.rewards] != ["task"]
    if configured:
        probe_rewards([{"name": part.name, **part.params} for part in config.rewards])
    judge = build_judge(config, task) if configured else None
    if judge is not None and judge.remote:
        most = 3 * MAX_REMOTE + MAX_REQUESTS + 2 * EXAMPLES  # gold, wrong and empty; attacks; examples
        typer.echo(f"keel: note: the checks send up to {most} requests to {' and '.join(judge.remote)}", err=True)
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    renderer = build_renderer(config, tokenizer)
    strict = model is not None or from_file
    checks = list(prove(task, renderer=renderer, strict=strict, judge=judge, count=samples, seed=config.run.seed))
    exploits = exploit(task, judge, samples, config.run.seed, TIME_LIMIT_S)
    checks += exploits.checks
    worked_examples: list[dict[str, Any]] = []
    try:
        worked_examples = examples(task, judge, seed=config.run.seed)
    except Exception:
        if all(check.ok for check in checks):  # a failed check already explains why the examples fail
            raise
    ok = all(check.ok for check in checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        attacks = [{**asdict(row), "verdict": row.verdict} for row in exploits.rows]
        print_json(
            {
                "task": task.name,
                "ok": ok,
                "checks": rows,
                "attacks": attacks,
                "warnings": exploits.warnings,
                "examples": worked_examples,
            }
        )
    else:
        _show(task.name, checks, exploits, worked_examples)
    return 0 if ok else 1


def _configuration(name: str, args: list[str]) -> tuple[Any, bool]:
    """The configuration of a file, a run or a task name, and whether it comes from a file."""
    from keel.config.load import is_run, qualify_task_option, read_config

    paths, overrides = split(args)
    if paths:
        raise KeelError(f"keel check-task takes one NAME, but {paths[0]!r} is another: write parameters as key=value")
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or is_run(path):
        config, renamed = read_config(path, overrides)
    else:
        config, renamed = read_config(
            {"task": {"name": name}}, [qualify_task_option(override) for override in overrides]
        )
        path = Path()
    for note in renamed:
        typer.echo(f"keel: note: {note}", err=True)
    return config, path != Path()


def _show(name: str, checks: list[Any], exploits: Any, worked_examples: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"checks of {escape(name)}", title_justify="left", title_style="bold")
    table.add_column("", width=1)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        mark = "[green]✓[/]" if check.ok else "[bold red]✗[/]"
        table.add_row(mark, check.name, escape(check.detail))
    console.print(table)
    if exploits.rows:
        console.print(_attacks(exploits.rows))
    for number, example in enumerate(worked_examples, start=1):
        console.print(_example(number, example))
    failed = [check.name for check in checks if not check.ok]
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(checks)} checks fail: {', '.join(failed)}[/]")
    else:
        console.print(f"[green]all {len(checks)} checks pass[/]")
    for warning in exploits.warnings:
        console.print(f"[yellow]warning: {escape(warning)}[/]")


MARKS = {"raises": "[bold red]✗[/]", "hole": "[bold red]✗[/]", "pays": "[yellow]![/]", "fine": ""}


def _attacks(rows: Any) -> Any:
    """A table of the empty answer and of each attack that earned a reward; one row sums up the others."""
    from rich.markup import escape
    from rich.table import Table

    paid = [row for row in rows if row.highest > 0 or row.verdict != "fine" or row.name == "empty"]
    gold = f"{rows[0].gold_reward:.3g}"
    title = f"attacks: reward without a solution (gold: {gold}) and its share of the gold reward; mean ≤ highest"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", width=1)
    table.add_column("attack", overflow="fold")
    for column in ("reward", "share", "correct"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("example", overflow="fold")
    for row in paid:
        reward = f"{row.mean_reward:.3g} ≤ {row.highest_reward:.3g}"
        share = f"{row.mean:.2f} ≤ {row.highest:.2f}"
        correct = f"{row.correct} of {row.problems}"
        table.add_row(MARKS[row.verdict], row.name, reward, share, correct, escape(repr(row.example[:40])))
    others = [row for row in rows if row not in paid]
    if others:
        highest = max(row.highest_reward for row in others)
        table.add_row("", f"{len(others)} others", f"≤ {highest:.3g}", "≤ 0.00", "", "")
    return table


def _example(number: int, example: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    prompt = example["prompt"]
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        table.add_row(message["role"], escape(_short(message["content"])))
    for kind, style in (("gold", "green"), ("wrong", "red")):
        answer = example[kind]
        parts = ", ".join(f"{part} {value:g}" for part, value in answer["parts"].items())
        table.add_row(f"[{style}]{kind}[/]", escape(_short(answer["text"])))
        table.add_row("", f"[{style}]earns {answer['total']:g}[/]" + (f" ({escape(parts)})" if parts else ""))
    return Panel(table, title=f"example {number}: {escape(example['key'])}", title_align="left")


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
