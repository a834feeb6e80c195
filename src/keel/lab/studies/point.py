"""One run of a study in its own process: link the warm start, train, measure the drift by task, write the outcome."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keel.base.errors import KeelError
from keel.base.files import JsonlFile, encode, read_json, write_atomic
from keel.config import Config, load_config
from keel.doctor.judge import guard_stop
from keel.doctor.runs import read_run
from keel.lab.compare import Direction, Side, load_pair, measure_drift, resolve
from keel.lab.report import AT_END
from keel.lab.studies.grid import Measurements
from keel.lab.studies.progress import supervised_lines
from keel.lab.studies.results import CONFIG, DONE, DRIFT, FAILED, INTERRUPTED, STOPPED, JobOutcome, write_outcome
from keel.run.build import build_policy, build_warmstart
from keel.run.evaluate import configured_tasks
from keel.run.parts import drop_long_prompts
from keel.run.train import run_training
from keel.run.warmstart import is_complete, warmstart, warmstart_folder
from keel.trainer.checkpoint import atomic_folder, no_progress_bars
from keel.trainer.integrity import find_damage

ESTIMATORS = ("exact", "k1", "k2", "k3")
# Plain English unrelated to all tasks, to measure forgetting.
SENTENCES = (
    "The river rises in the hills, runs past three villages, and reaches the sea by a wide and muddy mouth.",
    "When the bell rang, the children put away their books and ran out into the yard.",
    "Bread is made of flour, water, salt and yeast, and it needs time more than it needs skill.",
    "My grandmother kept bees for forty years and was stung, she said, exactly twice.",
    "The moon turns once around its axis in the time it takes to go once around the earth.",
    "He opened the letter slowly, read it twice, and then looked out of the window for a long while.",
    "A ship that leaves harbour in fog must sound its horn so that others know where it is.",
    "Most of the iron in the world was made in stars that died before our sun was born.",
    "She learned to play the violin late in life, and never regretted the hours it cost her.",
    "The old road over the pass is closed from the first snow until the end of April.",
    "If you heat water in an open pot, it boils at a lower temperature on a mountain than by the sea.",
    "The court found that the contract had been broken, and ordered that the money be paid back.",
    "There were only two chairs in the room, so the youngest of us sat on the floor.",
    "Owls can turn their heads so far because the bones of their necks leave room for the vessels.",
    "The price of wheat fell in the autumn, and many farmers sold their land the following year.",
    "Before the invention of printing, a single book could cost as much as a small house.",
    "The baker's shop on the corner opens at six, and by seven the best rolls are gone.",
    "A good map leaves out almost everything, and that is why it can be read.",
    "The doctor asked where it hurt, how long it had hurt, and what made it better or worse.",
    "Trees in a forest compete for light, which is why they grow taller there than in a field.",
    "The museum has a collection of clocks, and on the hour they do not all agree.",
    "It rained for nine days, and on the tenth the bridge was carried away.",
    "The first railways were laid to carry coal, and only later did anyone think of passengers.",
    "To tie this knot, cross the ends, pass one through the loop, and pull both at once.",
    "The dog waited at the gate every evening, although nobody had come home by that way for years.",
    "Salt lowers the freezing point of water, so it is thrown on roads in winter.",
    "The committee met on Tuesday, talked until noon, and decided to meet again.",
    "In the dry season the lake shrinks to a tenth of its size and the birds leave for the coast.",
    "He was a careful man who wrote down the number of every train he had ever taken.",
    "The garden had been left alone so long that roses grew through the windows of the shed.",
    "A whale is a mammal: it breathes air, it is warm, and it feeds its young with milk.",
    "The tailor measured his shoulders, shook his head, and measured them again.",
    "Glass is made by melting sand, and it was once worth more than silver.",
    "They walked along the beach until the tide came in and they had to climb the rocks.",
    "The teacher said that a mistake is worth more than a guess, because one can learn from it.",
    "At night the temperature in the desert falls so far that water freezes in the buckets.",
    "The library is quiet in the morning, but after school every table is taken.",
    "Two thirds of the town voted for the new bridge, and the rest used it all the same.",
    "The watchmaker needed a lens, a steady hand, and no interruptions.",
    "Summer ended on a Thursday, with a wind from the north and the smell of wood smoke.",
)


def measure_run(folder: Path, options: Measurements) -> dict[str, Any]:
    """KL between a run's last checkpoint and its start on held-out prompts of every task, and its text likelihood.

    `policy_ref` is KL(policy‖start) on the policy's samples, `ref_policy` KL(start‖policy) on the start's samples.
    """
    policy, start = resolve(str(folder)), resolve(f"{folder}@start")
    config = policy.config
    with no_progress_bars():
        sides = load_pair(policy, start)
    tasks = {}
    for task, split in configured_tasks(config):
        problems = drop_long_prompts(config, sides[0].loaded.tokenizer, task.held_out(options.prompts))
        drift = measure_drift(
            *sides,
            problems,
            samples=options.samples,
            max_tokens=config.rollout.max_completion_length,
            temperature=config.rollout.temperature,
            seed=config.run.seed + 1,
            chat_template=config.data.chat_template,
            system_prompt=config.data.system_prompt,
            allow_control_tokens=config.data.allow_control_tokens,
            microbatch_tokens=config.optim.microbatch_tokens,
        )
        assert drift.ref_policy is not None
        directions = {"policy_ref": _figures(drift.policy_ref), "ref_policy": _figures(drift.ref_policy)}
        tasks[task.name] = {"split": split, **directions}
    likelihood = {"before": text_logprob(sides[1]), "after": text_logprob(sides[0])} if options.text else None
    return {"tasks": tasks, "text_logprob": likelihood}


def _figures(direction: Direction) -> dict[str, Any]:
    """Nats per token and per sequence, by estimator."""
    return {
        unit: {name: {"mean": estimates[name].mean, "se": estimates[name].se} for name in ESTIMATORS}
        for unit, estimates in (("per_token", direction.per_token), ("per_sequence", direction.per_sequence))
    }


def text_logprob(side: Side, lines: Sequence[str] = SENTENCES) -> float:
    """Mean log-probability per token of plain text, in nats; each line separately, without its first token."""
    tokenizer, total, count = side.loaded.tokenizer, 0.0, 0
    with side.model() as model, torch.no_grad():
        for line in lines:
            ids = torch.tensor([tokenizer.encode(line)], device=side.loaded.device)
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            total += logprobs.gather(1, ids[0, 1:, None]).double().sum().item()
            count += ids.shape[1] - 1
    return total / max(1, count)


def shared_warmstart(shared: Path, config: Config) -> Path:
    """The folder of the warm start that this run shares; it depends on microbatches, which change the last digits."""
    return warmstart_folder(shared / f"{config.optim.microbatch_tokens}-{config.optim.precision}", config)


def make_warmstart(config: Config, folder: Path) -> None:
    """Train the warm start as a run does, unless an undamaged one exists; writes one line per step."""
    if is_complete(folder) and not find_damage(folder):
        return
    path = supervised_lines(folder)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with no_progress_bars(), closing(JsonlFile(path)) as lines:
        policy = build_policy(config)
        lines.append({"step": 0})
        recipe = partial(build_warmstart, config)
        warmstart(folder, policy, recipe, lambda step, metrics: lines.append({"step": step, **metrics}))


def link_warmstart(config: Config, source: Path, run: Path) -> None:
    """Put the shared warm start into a run's folder, by hard links if the file system has them."""
    target = warmstart_folder(run, config)
    if is_complete(target):
        return
    with atomic_folder(target) as temporary:
        for file in sorted(source.iterdir()):
            try:
                os.link(file, temporary / file.name)
            except OSError:
                shutil.copy2(file, temporary / file.name)


def run_point(config: Config, measure: Measurements, shared: Path) -> JobOutcome:
    """Train or resume a run, measure its drift, and write the outcome unless the run was interrupted."""
    folder = Path(config.run.dir) / config.run.name
    try:
        outcome = _train(config, folder, shared)
        if outcome.state in (DONE, STOPPED) and read_json(folder / DRIFT) is None:  # written atomically, so complete
            write_atomic(folder / DRIFT, encode(measure_run(folder, measure), indent=2) + "\n")
    except KeelError as error:
        outcome = JobOutcome(FAILED, str(error))
    if outcome.state != INTERRUPTED and folder.is_dir():
        write_outcome(folder, outcome)
    return outcome


def _train(config: Config, folder: Path, shared: Path) -> JobOutcome:
    if not (folder / "summary.json").is_file():
        if config.warmstart is not None:
            folder.mkdir(parents=True, exist_ok=True)
            link_warmstart(config, shared_warmstart(shared, config), folder)
        try:
            result = run_training(config, at_end=AT_END)
        except KeelError as error:
            stop = guard_stop(read_run(folder))
            if stop is None:
                raise
            print(f"keel: {error}", file=sys.stderr)
            return JobOutcome(STOPPED, stop)
        if result.exit_status >= 128:
            return JobOutcome(INTERRUPTED)
    stop = guard_stop(read_run(folder))
    return JobOutcome(DONE) if stop is None else JobOutcome(STOPPED, stop)


def main(argv: list[str] | None = None) -> int:
    """`python -m keel.lab.studies.child --shared FOLDER [--measure JSON]`; without `--measure` only the warm start.

    The configuration is in the environment, as JSON.
    """
    parser = argparse.ArgumentParser(prog="keel.lab.studies.child")
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--measure")
    args = parser.parse_args(argv)
    config = load_config(json.loads(os.environ.pop(CONFIG)))
    try:
        if args.measure is None:
            make_warmstart(config, shared_warmstart(args.shared, config))
            return 0
        outcome = run_point(config, Measurements(**json.loads(args.measure)), args.shared)
    except KeelError as error:
        sys.stderr.write(f"keel: error: {' '.join(str(error).split())}\n")
        return 2
    if outcome.reason:
        sys.stderr.write(f"keel: {outcome.state}: {outcome.reason}\n")
    return {DONE: 0, STOPPED: 0, INTERRUPTED: 130}.get(outcome.state, 2)
