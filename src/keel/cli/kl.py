"""`keel kl`: measure the KL between two models; `keel verify`: verify the KL estimators, or audit a formula."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.cli.app import app, print_json, split

KL_HELP = """Measure the KL between two models on given prompts or on a task's held-out problems.

The policy answers every prompt; both models score every token. Output: all estimators and the exact KL over the
vocabulary in both directions, per token and per sequence, with standard errors; the tokens and positions with the
largest KL; the completion with the largest KL, in colour.

POLICY and REFERENCE are each a folder, a hub name, a .gguf file, a LoRA adapter (on --base, or on the base in its
config), a run folder (its newest checkpoint), RUN@STEP, RUN@best or RUN@start. The default REFERENCE is the initial
policy of a run, or the base of an adapter. A run provides its task, chat template and system prompt.

Examples:

  keel kl runs/default

  keel kl runs/default@100 runs/default@200 --task arithmetic skill=sort --plot drift.png

  keel kl ./my-model HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl --samples 8 --max-tokens 256

  keel kl ./my-model ./other-model --task dataset data.path=mine.jsonl

  keel kl ./my-adapter --base ./my-model --prompts prompts.txt --json
"""


@app.command(help=KL_HELP)
def kl(
    args: Annotated[
        list[str],
        typer.Argument(metavar="POLICY [REFERENCE] [KEY=VALUE]...", help="The two models, and parameters of --task."),
    ],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: .txt (one per line), .jsonl, .json, .csv or .parquet.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Use held-out problems of this task.")] = None,
    count: Annotated[
        int | None,
        typer.Option("--num-prompts", min=1, help="Number of prompts (default: all of a file, 32 of a task)."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum completion length.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling and of both distributions.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = 0,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model of an adapter.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="auto, none, or a template's name (default: the run's, or auto).")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System prompt (default: the run's).")] = None,
    reverse_samples: Annotated[
        bool, typer.Option(help="Also sample from the reference, for the sequence KL(reference‖policy).")
    ] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one).")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code shipped with a model.")
    ] = False,
    microbatch_tokens: Annotated[int, typer.Option(min=1, help="Tokens scored per batch.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Completions sampled per batch.")] = 64,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Sampling engine: native or module:attr.")] = "native",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Plot positions, estimators and tokens to this file.")
    ] = None,
) -> int:
    from keel.lab.plots.picture import check_picture

    if plot is not None:
        check_picture(plot)
    if not 0 < temperature < float("inf"):
        raise KeelError(f"--temperature is {temperature:g}: the KL needs a positive, finite temperature; use 1")
    names, params = split(args)
    if len(names) not in (1, 2):
        raise KeelError(f"keel kl takes POLICY and REFERENCE, not {len(names)} models: {' '.join(names)}")
    source = _prompt_source(prompts, task, params)
    from keel.rollout.registry import find_engine

    find_engine(engine, "--engine")
    from rich.console import Console

    from keel.lab.compare import default_reference, load_pair, measure_drift, resolve

    options: dict[str, Any] = {"base": base, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    policy = resolve(names[0], **options)
    reference = resolve(names[1], **options) if len(names) == 2 else default_reference(policy, **options)
    if base is not None and policy.adapter is None and reference.adapter is None:
        raise KeelError(f"--base {base} needs an adapter, and {' and '.join(names)} has none: leave --base out")
    data = policy.config.data
    problems = _problems(source, policy, count)
    with Console(stderr=True).status("loading both models") as status:
        pair = load_pair(policy, reference)
        status.update(f"sampling and scoring {len(problems)} prompts")
        drift = measure_drift(
            *pair,
            problems,
            samples=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            chat_template=data.chat_template if chat_template is None else chat_template,
            system_prompt=data.system_prompt if system_prompt is None else system_prompt,
            allow_control_tokens=data.allow_control_tokens,
            reverse_samples=reverse_samples,
            microbatch_tokens=microbatch_tokens,
            max_batch=max_batch,
            engine=engine,
        )
    if plot is not None:
        from keel.lab.compare.show import plot_drift

        plot_drift(drift, plot)
    if as_json:
        print_json(drift.as_dict())
        return 0
    from keel.lab.compare.show import show_drift

    show_drift(drift, Console())
    if plot is not None:
        typer.echo(f"wrote {plot}")
    return 0


def _prompt_source(file: Path | None, task: str | None, params: list[str]) -> Any:
    """Return the prompts of the file, or the task, or None. Errors are raised before a model is loaded."""
    if file is not None and task is not None:
        raise KeelError("--prompts and --task exclude each other: give one")
    if params and task is None:
        raise KeelError(f"{params[0]} is a parameter of a task: name the task with --task")
    if file is not None:
        from keel.lab.compare import read_prompts

        return read_prompts(file)
    if task is None:
        return None
    return _named_task(task, params)


def _named_task(task: str, params: list[str]) -> Any:
    """Build the task from its parameters and data options, written as in `keel check-task`."""
    from keel.config.load import qualify_task_option, read_config
    from keel.envs.options import SourceOptions
    from keel.run.parts import build_named_task

    settings = [qualify_task_option(override) for override in params]
    reads = list(SourceOptions.model_fields)
    for setting in settings:
        section, _, name = setting.lstrip("+").partition("=")[0].partition(".")
        if section != "task" and (section != "data" or name.partition(".")[0] not in reads):
            raise KeelError(
                f"{setting} is not a parameter of a task: keel kl takes task.*, data.{', data.'.join(reads)} "
                "and its own options"
            )
    config, _ = read_config({"task": {"name": task}}, settings)
    return build_named_task(config.task, config)


def _problems(source: Any, policy: Any, count: int | None) -> Any:
    """The prompts to measure on (default: those of the run's task)."""
    if isinstance(source, list):
        return source[:count]
    if source is None:
        if not policy.run:
            raise KeelError(f"no prompts for {policy.name!r}: give --prompts FILE or --task NAME")
        from keel.run.parts import build_named_task

        source = build_named_task(policy.config.task, policy.config)
    return source.held_out(32 if count is None else count)


VERIFY_HELP = """Verify every KL fact by exact enumeration, or audit a KL formula of your own.

Without options: verify all facts and print them as tables (exit status 1 if one fails).

With --peers: verify the KL terms of installed trainers (TRL, verl and others) by calling their functions.

With --formula or --callable: report what the value estimates, the expected gradient in the loss, the advantage and
the reward, on- and off-policy, where the formula overflows, and which estimator to use instead.

Examples:

  keel verify

  keel verify --formula 'exp(ref - logp) - (ref - logp) - 1'

  keel verify --callable my_trainer.kl:per_token_kl --json

  keel verify --peers

  keel verify --plot estimators.png

A formula may use logp, ref, old (the sampler's log-probability; on-policy the detached logp), numbers, + - * / **,
and exp, expm1, log, log1p, abs, clamp(x, low, high), minimum, maximum, detach, sigmoid, softplus.
"""


@app.command(help=VERIFY_HELP)
def verify(
    formula: Annotated[str | None, typer.Option(help="Audit this formula of logp, ref and old.")] = None,
    function: Annotated[
        str | None,
        typer.Option("--callable", help="Audit module:function, called as f(logp, ref[, old]) on [B, T] tensors."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Verify the KL terms of installed trainers (TRL, verl and others).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot bias and standard deviation of the estimators against the true KL to this file."),
    ] = None,
) -> int:
    given = [name for name, on in (("--formula", formula), ("--callable", function), ("--peers", peers)) if on]
    if len(given) > 1:
        raise KeelError(f"{given[0]} and {given[1]} exclude each other: give one")
    import torch
    from rich.console import Console

    from keel.lab.report.terminal import plot_estimators, show_audit, show_checks
    from keel.verify import audit, load_callable, parse_formula, run

    torch.set_num_threads(1)  # the tensors are tiny, so threads only add overhead
    console = Console()
    if plot is not None:
        plot_estimators(plot)
        if not as_json:
            typer.echo(f"wrote {plot}")
    if peers:
        return _peers(as_json)
    if formula is not None or function is not None:
        term = parse_formula(formula) if formula is not None else load_callable(str(function))
        report = audit(term, formula if formula is not None else str(function))
        if as_json:
            print_json(report)
        else:
            show_audit(report, console)
        return 0
    if as_json:
        rows = [check for _, checks in run() for check in checks]
        print_json({"ok": all(row.ok for row in rows), "facts": [asdict(row) for row in rows]})
    else:
        rows = show_checks(run(), console)
    return 0 if all(row.ok for row in rows) else 1


def _peers(as_json: bool) -> int:
    """Verify the KL terms of installed trainers. Print each result at once, because importing a trainer is slow."""
    from contextlib import redirect_stdout

    from keel.integrations.formulas import lines, peers

    found, out = [], sys.stdout
    with redirect_stdout(sys.stderr):  # trainers print while they are imported
        for peer in peers():
            found.append(peer)
            if not as_json:
                typer.echo("\n".join(lines(peer)), file=out)
    if not any(peer.rows for peer in found):
        raise KeelError(
            "no installed trainer has KL terms that can be called: pip install 'trl==1.16.*' or 'verl==0.9.*'"
        )
    if as_json:
        print_json({"peers": [asdict(peer) for peer in found]})
    return 0
