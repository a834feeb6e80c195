"""`keel sft`: supervised fine-tuning by the `warmstart` section, with a run directory and an evaluation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.world import World, open_world
from keel.config import Config, load_config
from keel.loggers import RunDirectory
from keel.run.build import build_policy, build_run, build_warmstart
from keel.run.environment import environment, settings_of
from keel.run.result import NO_HOOKS, EndHooks
from keel.run.resume import write_config
from keel.run.train import RunOutcome, evaluator, open_loggers, open_run, write_run_report
from keel.trainer.checkpoint import atomic_folder, full_state_dict, save_manifest, save_weights
from keel.trainer.sft import DrawCount, sft
from keel.trainer.state import State
from keel.trainer.summary import summarise


def run_sft(config: Config, at_end: EndHooks = NO_HOOKS) -> RunOutcome:
    """Supervised fine-tuning by the `warmstart` section; saves the model in `checkpoints/step-N`."""
    if config.run.if_exists == "resume":
        raise KeelError("keel sft cannot resume a run: use run.if_exists=replace, or another run.name")
    with (
        open_world(config.model.device, settings=settings_of(config)) as world,
        open_run(config, resume=False, world=world) as (directory, _),
    ):
        return _run_sft(config, directory, at_end, world)


def _run_sft(config: Config, directory: RunDirectory, at_end: EndHooks, world: World) -> RunOutcome:
    began = time.monotonic()
    write_config(directory, config)
    directory.write_json("env.json", environment())
    loaded = build_policy(config)
    draws = DrawCount()
    start = build_warmstart(config, loaded, draws=draws)
    steps = start.options.steps
    loggers = open_loggers(config, directory, None, total_steps=steps, world=world)
    with ExitStack() as at_exit:
        at_exit.callback(loggers.close)
        # SFT measures no KL, so no reference is built
        built = build_run(load_config(config, ["kl.beta=0", "kl.measure_every=0"]), loaded, world=world)
        at_exit.callback(built.run.close)
        evaluate = evaluator(config, built)
        before = evaluate()
        for record in before:
            loggers.evaluation(0, record)

        def report(step: int, line: Mapping[str, float]) -> None:
            loggers.step(step, line)

        sft(loaded, *start, report, world)
        built.run.engine.sync(loaded.model)
        for note in draws.notes:
            loggers.event("note", step=steps, message=note)
        after = evaluate()
        for record in after:
            loggers.evaluation(steps, record)
        checkpoint = _save(directory.checkpoints / f"step-{steps}", config, loaded, world)
        loggers.event("checkpoint", step=steps, path=str(checkpoint.relative_to(directory.path)))
        state = State(
            kl=built.run.controller.init(),
            step=steps,
            before=tuple(before),
            evaluated=tuple(after),
            wall_s=time.monotonic() - began,
        )
        summary: dict[str, Any] = summarise(built.run.task.name, state)
        directory.write_json("findings.json", None)  # not judged
        directory.write_json("summary.json", summary)
        directory.sync()
        if world.is_main:
            write_run_report(directory.path, loggers, at_end)
    return RunOutcome(summary, directory.path, steps)


def _save(target: Path, config: Config, loaded: Any, world: World) -> Path:
    weights = full_state_dict(loaded.model, wanted=world.is_main)
    if world.is_main:
        _write(target, config, loaded, weights)
    world.barrier()
    return target


def _write(target: Path, config: Config, loaded: Any, weights: Any) -> None:
    card = f"# {config.run.name}\n\n`{config.model.name}` after supervised fine-tuning with Keel (`keel sft`).\n"
    with atomic_folder(target) as temporary:
        save_weights(temporary, loaded.model, loaded.tokenizer, weights)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        save_manifest(temporary)
