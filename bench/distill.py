"""On-policy distillation on the default task: which divergences bring the student to the teacher, and which do not.

    make train                                  # once: the student is its warm start, the teacher its end
    python bench/distill.py run                 # 13 points and SFT, one seed; then the table
    python bench/distill.py run --seeds 3 --only "exact reverse KL" "k1 in the loss" run.max_steps=40
    python bench/distill.py table               # the table of what has run
    python bench/distill.py cost                # time of a step with the exact KL over that with the sampled one

Every arm has the same two models. The points are in bench/distill.yaml and run as `keel ablate` runs them. SFT on the
teacher's samples is run here: the problems and the number of samples are an arm's. The predictions were written down
before the first run.

`near`: the exact KL(student‖teacher) on held-out prompts falls below half of the start's. `away`: it rises above one
and a half times. `still`: neither.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.config import Config, load_config
from keel.doctor.runs import read_run
from keel.lab.compare import load_pair, measure_drift, resolve
from keel.lab.compare.measure import render, sample
from keel.lab.studies import read_study
from keel.lab.studies.results import jobs
from keel.lab.studies.run import run_study
from keel.rollout import SamplingParams
from keel.run.build import build_named_task, build_policy, build_run
from keel.run.train import run_sft as train_sft
from keel.trainer.state import State
from keel.trainer.step import train_step

HERE = Path(__file__).resolve().parent
STUDY = HERE / "distill.yaml"
TEACHER = "DISTILL_TEACHER"  # the variable that tells the process of a point where the teacher lies
SFT = "SFT on the teacher's samples"
PROMPTS, SAMPLES = 128, 8  # of the KL on held-out prompts
NEAR, AWAY = 0.5, 1.5  # times the start's KL
COST_TURNS = 6


@dataclass(frozen=True)
class Prediction:
    """What was predicted of an arm, and why."""

    kind: str  # right | wrong | control
    outcome: str  # near | still | away
    why: str


# Written before the first run of this file. A pilot had shown five of the forms (exact, k3 in loss and reward, k1 in
# advantage and loss), so those five are no blind predictions.
PREDICTIONS = {
    "exact reverse KL": Prediction("right", "near", "the gradient is that of KL(student‖teacher)"),
    "k1 in the advantage": Prediction("right", "near", "the same expected gradient, from the sampled token alone"),
    "unbiased top-8": Prediction("right", "near", "the same expected gradient, with less noise than k1"),
    "k1 with its future": Prediction("right", "near", "the gradient of the sequence's KL; more variance, so later"),
    "exact forward KL": Prediction("right", "near", "cosine 0.90 to the reverse KL's gradient"),
    "JSD": Prediction("right", "near", "between the two, with a quarter of the curvature, so later"),
    "clamped k3 in the loss": Prediction("wrong", "near", "forward KL under the name reverse; no gradient above 10"),
    "clamped k3 in the advantage": Prediction("wrong", "still", "the difference of two gradients that cancel"),
    "k1 in the loss": Prediction("wrong", "away", "expected gradient zero: a random walk under Adam"),
    "prefix only": Prediction("wrong", "away", "expected gradient zero: a random walk under Adam"),
    "shuffled teacher": Prediction("control", "away", "the student learns wrong digits"),
    "fixed negative advantage": Prediction("control", "away", "the gradient of k1 in the loss, token by token"),
    "GRPO": Prediction("control", "near", "it made the teacher from this start"),
    SFT: Prediction("control", "near", "forward KL on the teacher's own prefixes"),
}


# ------------------------------------------------------------------------------------------------- wrong forms


def clamped_k3(d: Tensor) -> Tensor:
    """k3, held at 10: as a loss verl's default, as an advantage its default with `use_policy_gradient`."""
    return (torch.expm1(d) - d).clamp(max=10.0)


def one(d: Tensor) -> Tensor:
    """A penalty that says nothing of the teacher: each token's advantage is −β."""
    return torch.ones_like(d)


def shuffled_teacher(attn_implementation: str = "sdpa") -> tuple[nn.Module, Any]:
    """The teacher, as sure as before, with each digit's logit at the next digit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.environ[TEACHER]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn_implementation)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    weight = model.get_output_embeddings().weight.detach()
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.weight[digits] = weight[[*digits[1:], digits[0]]]
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return model, tokenizer


# ------------------------------------------------------------------------------------------------- running


def two_models(run: Path) -> tuple[Path, Path]:
    """(student, teacher): the start and the end of a run of configs/default.yaml."""
    starts, ends = list(run.glob("warmstart/*/config.json")), list(run.glob("checkpoints/step-*"))
    if len(starts) != 1 or not (run / "summary.json").is_file():
        raise KeelError(f"{run} holds no finished run with one warm start: run make train, or name one with --models")
    return starts[0].parent.resolve(), max(ends, key=lambda folder: int(folder.name.partition("-")[2])).resolve()


def study_of(student: Path, teacher: Path, seeds: int, only: list[str], overrides: list[str]) -> Any:
    """The study of these two models; points' processes find this file and the teacher by the environment."""
    os.environ[TEACHER] = str(teacher)
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(HERE))
    data = read_yaml(STUDY)
    data["set"] |= {"model.name": str(student), "reference.model": str(teacher)}
    if only:
        data["points"] = [point for point in data["points"] if point["name"] in only]
    data["config"] = str(STUDY.parent / data["config"])
    return read_study(data, overrides, seeds=str(seeds))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file, read as Keel reads configurations."""
    from keel.config import text

    return dict(text.read(path))


def run_sft(config: Config, teacher: Path, out: Path) -> Path:
    """SFT of the student on the teacher's samples of the problems that the points' steps draw; the run's folder."""
    folder = out / "sft"
    if (folder / "summary.json").is_file():
        return folder
    file, steps = out / "teacher_samples.jsonl", config.run.max_steps
    with file.open("w", encoding="utf-8") as lines:
        for line in teacher_samples(config, teacher):
            lines.write(json.dumps(line) + "\n")
    start = {"path": str(file), "steps": steps, "batch_size": config.episodes_per_step, "schedule": "constant"}
    start |= {"learning_rate": config.optim.learning_rate, "warmup_steps": 0}
    plain = config.to_dict() | {"warmstart": start}
    named = [f"run.dir={json.dumps(str(out))}", "run.name=sft", "run.if_exists=replace"]
    train_sft(load_config(plain, [*named, "loss.policy_weight=1", "kl.beta=0"]))
    return folder


def teacher_samples(config: Config, teacher: Path) -> Iterator[dict[str, Any]]:
    """Prompt and completion of what the teacher writes and ends, for every problem of the run."""
    task, (side, _) = build_named_task(config.task, config), load_pair(resolve(str(teacher)), resolve(str(teacher)))
    sampling = SamplingParams.of(config.rollout)
    for step in range(config.run.max_steps):
        problems = task.sample(config.rollout.prompts_per_step, seed=config.run.seed, step=step)
        prompts = render(side, side, problems, sampling.max_completion_length)
        for group in sample(side, problems, prompts, sampling, seed=config.run.seed, attempt=step):
            ended = [completion for completion in group.completions if completion.stop_reason == "eos"]
            yield from ({"prompt": group.problem.prompt, "completion": completion.text} for completion in ended)


# ------------------------------------------------------------------------------------------------- table


def row_of(arm: str, seed: int, run: Path, teacher: Path, start: dict[str, float]) -> dict[str, Any]:
    """One run in numbers, beside its prediction."""
    record, prediction = read_run(run), PREDICTIONS[arm]
    evaluated = [(int(line["step"]), line) for line in record.evaluations if line.get("split") == "trained"]
    last, kl = evaluated[-1][1], kl_between(run, teacher)
    seconds = {int(step): value for step, value in record.series("time/total_s") if value is not None}
    half = (start["accuracy"] + start["teacher_accuracy"]) / 2
    reached = next((step for step, line in evaluated if line["pass@1"] >= half), None)
    ratio = kl["kl_student_teacher"] / start["kl_student_teacher"]
    outcome = "near" if ratio < NEAR else "away" if ratio > AWAY else "still"
    return {
        "arm": arm,
        "kind": prediction.kind,
        "seed": seed,
        "predicted": prediction.outcome,
        "outcome": outcome,
        "as_predicted": "yes" if outcome == prediction.outcome else "no",
        "accuracy": last["pass@1"],
        "accuracy_low": last["ci95"][0],
        "accuracy_high": last["ci95"][1],
        "pass_at_4": last["pass@k"].get("4", ""),
        **kl,
        "half_gap_step": "" if reached is None else reached,
        "half_gap_s": sum(s for step, s in seconds.items() if step <= reached) if reached and seconds else "",
        "step_s": statistics.median(seconds.values()) if seconds else "",
        "why": prediction.why,
    }


def kl_between(policy: Path, teacher: Path) -> dict[str, float]:
    """Exact KL in nats per token on held-out prompts, each direction on its own samples."""
    first, config = resolve(str(policy)), load_config(HERE.parent / "configs/default.yaml")
    problems = build_named_task(config.task, config).held_out(PROMPTS)
    limit = config.rollout.max_completion_length
    drift = measure_drift(*load_pair(first, resolve(str(teacher))), problems, samples=SAMPLES, max_tokens=limit)
    assert drift.ref_policy is not None
    exact, reverse = drift.policy_ref.per_token["exact"], drift.ref_policy.per_token["exact"]
    return {"kl_student_teacher": exact.mean, "kl_teacher_student": reverse.mean}


def start_of(models: Path, student: Path, teacher: Path) -> dict[str, float]:
    """Accuracy of both models, as their run evaluated them, and the KL between them."""
    trained = [line for line in read_run(models).evaluations if line.get("split") == "trained"]
    both = {"accuracy": trained[0]["pass@1"], "teacher_accuracy": trained[-1]["pass@1"]}
    return both | kl_between(student, teacher)


def write_table(study: Any, out: Path, models: Path) -> list[dict[str, Any]]:
    """table.csv of every run that has ended, and start.json."""
    student, teacher = two_models(models)
    start = start_of(models, student, teacher)
    (out / "start.json").write_text(json.dumps(start, indent=2) + "\n", encoding="utf-8")
    runs = [(job.point.label, job.seed, job.folder) for job in jobs(out.resolve(), study)]
    runs.append((SFT, study.seeds[0], out / "sft"))
    ended = [(arm, seed, run) for arm, seed, run in runs if (run / "summary.json").is_file()]
    rows = [row_of(arm, seed, run, teacher, start) for arm, seed, run in ended]
    if rows:
        with (out / "table.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    print(f"start: {_line(start)}")
    for row in rows:
        print(_line({key: row[key] for key in row if key != "why"}))
    missing = [arm for arm, _, run in runs if not (run / "summary.json").is_file()]
    if missing:
        print(f"missing: {', '.join(missing)}")
    return rows


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{key}={_short(value)}" for key, value in row.items() if value != "")


# ------------------------------------------------------------------------------------------------- cost


def cost(student: Path, teacher: Path, overrides: list[str]) -> dict[str, Any]:
    """Median seconds of a step, and of its update, with the exact KL and with the sampled one, in turns."""
    shared = [f"model.name={json.dumps(str(student))}", f"reference.model={json.dumps(str(teacher))}"]
    shared += ["warmstart=null", "loss={policy_weight: 0, scale_rewards: none}", "kl.level=token", "kl.beta=1"]
    forms = {"exact": ["kl.estimator=exact"], "sampled": ["kl.estimator=k1", "kl.placement=advantage"]}
    sides: dict[str, Any] = {}
    for name, form in forms.items():
        config = load_config(HERE.parent / "configs/default.yaml", [*shared, *form, *overrides])
        run = build_run(config, build_policy(config)).run
        sides[name] = (run, train_step(run, State(kl=run.controller.init())).state)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(COST_TURNS):
        for name, (run, state) in sides.items():
            step = train_step(run, state)
            sides[name] = (run, step.state)
            seconds[name].append((step.metrics["time/total_s"], step.metrics["time/update_s"]))
    for run, _ in sides.values():
        with closing(run):
            pass
    median = {name: [statistics.median(part) for part in zip(*both, strict=True)] for name, both in seconds.items()}
    ratios = [exact / sampled for exact, sampled in zip(median["exact"], median["sampled"], strict=True)]
    return {
        "step_s": {name: both[0] for name, both in median.items()},
        "step_ratio": ratios[0],
        "update_ratio": ratios[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "cost"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, default=Path("runs/default"))
    parser.add_argument("--out", type=Path, default=Path("runs/studies/distill"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="without others, and without SFT")
    args = parser.parse_intermixed_args()
    try:
        student, teacher = two_models(args.models)
        if args.what == "cost":
            print(json.dumps(cost(student, teacher, args.overrides)))
            return 0
        study = study_of(student, teacher, args.seeds, args.only, args.overrides)
        if args.what == "run":
            run_study(study, args.out, say=print)
            if not args.only:
                run_sft(study.config, teacher, args.out)
        write_table(study, args.out, args.models)
    except KeelError as error:
        print(f"distill: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
