"""Keel's results on a real model: each a configuration under configs/results and one command here.

    python bench/results.py start NAME --model FOLDER [--data FOLDER] --out DIR     # once; `run` makes it if missing
    python bench/results.py run NAME --seed 0 --model FOLDER [--data FOLDER] --minutes 5 --out DIR [--trainer trl]
    python bench/results.py table DIR... --out docs/results                         # CSVs of all runs and studies
    python bench/results.py plot docs/results --out docs/images
    python bench/results.py page docs/results --out docs/results.md
    python bench/results.py run NAME --tiny --minutes 0.1 --out DIR                 # the whole path on a CPU
    bench/results_gsm8k_kl.sh MODEL DATA OUT                                        # GSM8K's runs, and the study of β

NAME is gsm8k, gsm8k_more_sft or countdown; FOLDER of --data holds GSM8K's train.jsonl and test.jsonl. A run ends when
its training has taken so many minutes; loading, and evaluations between steps, are not counted. All runs of a job go on
from one supervised start. GSM8K is trained on the problems that the start answers sometimes: in some of 8 samples and
not in all; what that choice took is added to the time of gsm8k_more_sft. A run's folder holds curve.csv and
summary.json. `--set option=value` changes an option of Keel, and with it TRL's. `--beside 3` says that three other runs
share the GPU: such a run takes no part in the race against TRL.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import keel
import results_page
from keel.base.files import encode, read_json, write_atomic
from keel.config import Config, load_config
from results_eval import Evaluator, evaluate_whole, exact_kl, free_memory
from results_page import write_csv
from results_sides import TRAINERS, Work

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "results"
PASS_RATE_SAMPLES = 8


@dataclass(frozen=True)
class Job:
    """`start` is the job whose supervised start it goes on from; `whole` the held-out problems of a full evaluation."""

    start: str
    whole: int
    reads_data: bool = False
    trainers: tuple[str, ...] = ("keel", "trl")


JOBS = {
    "gsm8k": Job("gsm8k", 1319, reads_data=True),
    "gsm8k_more_sft": Job("gsm8k", 1319, reads_data=True, trainers=("sft",)),
    "countdown": Job("countdown", 1024),
}
TINY = ["model.name=tiny", "model.device=cpu", "optim.precision=auto", "rollout.prompts_per_step=4"]
TINY += ["rollout.num_generations=4", "rollout.max_completion_length=24", "data.max_prompt_length=512", "eval.every=2"]
TINY += ["eval.samples=8", "warmstart.steps=30", "warmstart.batch_size=8", "warmstart.learning_rate=1e-3"]


# ------------------------------------------------------------------------------------------------ configurations


def config_of(name: str, args: argparse.Namespace) -> Config:
    """The job's configuration with the model and data that were given, before any supervised start."""
    overrides = [] if args.model is None else [f"model.name={json.dumps(str(args.model))}"]
    overrides += TINY if args.tiny else []
    if JOBS[name].reads_data:
        data = tiny_data(args.out) if args.tiny else args.data
        files = {"data.path": data / "train.jsonl", "task.eval_path": data / "test.jsonl"} if data else {}
        overrides += [f"{option}={json.dumps(str(path.resolve()))}" for option, path in files.items()]
    return load_config(CONFIGS / f"{name}.yaml", [*overrides, *args.set])


def tiny_data(out: Path) -> Path:
    """A few sums in GSM8K's form."""
    folder = out / "tiny-data"
    if folder.exists():  # a start goes by the time of its files
        return folder
    folder.mkdir(parents=True)
    for split, first in (("train", 1), ("test", 6)):
        rows = [(a, b) for a in range(first, first + 5) for b in range(1, 8)]
        lines = [json.dumps({"question": f"{a}+{b}?", "answer": f"{a + b}\n#### {a + b}"}) for a, b in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------------ the start


def prepare(name: str, args: argparse.Namespace) -> tuple[Path, float, list[str]]:
    """The supervised start of a job, made where it is missing; the seconds that the choice of problems took, and the
    overrides that train on the chosen ones."""
    from keel.run.build import build_policy, build_warmstart
    from keel.run.warmstart import is_complete, warmstart, warmstart_folder

    first = JOBS[name].start
    config, home = config_of(first, args), args.out / first
    start = warmstart_folder(home, config)
    if not is_complete(start):
        began = time.perf_counter()
        loss = warmstart(start, build_policy(config), lambda loaded: build_warmstart(config, loaded))
        free_memory()
        print(f"{first}: supervised start in {time.perf_counter() - began:.0f} s, loss {loss:.3f}: {start}", flush=True)
    beside, plain = start.with_suffix(".json"), without_start(config, start)  # a digest is a name without a dot
    asked = json.loads(encode({"problems": whole_of(first, args), **plain.to_dict()["rollout"]}))
    if (read_json(beside) or {}).get("asked") != asked:
        record = {"asked": asked, "start": evaluate_whole(plain, start, whole_of(first, args)), "choice_s": 0.0}
        record |= choose_problems(plain, start) if JOBS[first].reads_data else {}
        write_atomic(beside, encode(record, indent=1) + "\n")
        print(f"{first}: {encode(record)}", flush=True)
    choice_s = float(read_json(beside)["choice_s"])
    chosen = start.with_suffix(".jsonl")
    return start, choice_s, [f"data.path={json.dumps(str(chosen.resolve()))}"] if chosen.exists() else []


def whole_of(name: str, args: argparse.Namespace) -> int:
    return 16 if args.tiny else JOBS[name].whole


def without_start(config: Config, start: Path, *more: str) -> Config:
    """The configuration that goes on from a supervised start."""
    return load_config(config, [f"model.name={json.dumps(str(start.resolve()))}", "warmstart=null", *more])


def choose_problems(config: Config, start: Path) -> dict[str, Any]:
    """Write the training rows that the start answers sometimes, and say how many there are of how many."""
    from keel.envs.judge import Judge
    from keel.eval.evaluate import evaluate
    from keel.run.build import build_collector, build_named_task
    from keel.run.parts import drop_long_prompts

    began, task = time.perf_counter(), build_named_task(config.task, config)
    with closing(Evaluator(config, start, **{"rollout.max_batch": 1024})) as evaluator:
        tokenizer = evaluator.loaded.tokenizer
        collector = build_collector(evaluator.config, evaluator.engine, task, tokenizer, Judge.of(task))
        problems = drop_long_prompts(config, tokenizer, task.train)
        drawn = {"samples": PASS_RATE_SAMPLES, "temperature": config.rollout.temperature}
        result = evaluate(replace(collector, seed=0, max_turns=1), problems, **drawn)
    rates = {group.problem.key: share for group, share in zip(result.groups, result.shares, strict=True)}
    rows = Path(str(config.data.path)).read_text(encoding="utf-8").splitlines()
    sometimes = sorted(int(key.rpartition(":")[2]) for key, rate in rates.items() if 0 < rate < 1)
    if not sometimes:
        raise SystemExit("bench/results.py: the start answers no training problem sometimes: GRPO has nothing to learn")
    write_atomic(start.with_suffix(".jsonl"), "".join(f"{rows[number - 1]}\n" for number in sometimes))
    spent = time.perf_counter() - began
    return {"choice_s": spent, "chosen": len(sometimes), "of": len(rates), "train_pass_1": fmean(rates.values())}


# ------------------------------------------------------------------------------------------------ the runs


def run(name: str, args: argparse.Namespace) -> None:
    """Train, evaluate the end on everything, write curve.csv and summary.json."""
    trainer = args.trainer or JOBS[name].trainers[0]
    if trainer not in JOBS[name].trainers:
        raise SystemExit(f"bench/results.py: {name} is run by {' or '.join(JOBS[name].trainers)}, not by {trainer}")
    start, choice_s, chosen = prepare(name, args)
    seed = f"run.seed={args.seed}"
    if trainer == "sft":  # learns from all problems, as the start did
        config = load_config(config_of(name, args), [f"model.name={json.dumps(str(start.resolve()))}", seed])
    else:
        config = without_start(config_of(name, args), start, seed, *chosen)
    work = Work(name, trainer, args.seed, args.minutes, args.out, start, config, whole_of(name, args), choice_s)
    work.folder.mkdir(parents=True, exist_ok=True)
    rows, model, more = TRAINERS[trainer](work)
    write_csv(work.folder / "curve.csv", rows)
    summary = {
        "name": name,
        "trainer": trainer,
        "seed": args.seed,
        "tiny": args.tiny,
        "settings": " ".join(args.set),
        "beside": args.beside,
        "minutes": args.minutes,
        "keel": keel.__version__,
        "steps": rows[-1]["step"],
        "train_s": rows[-1]["wall_s"],
        "choice_s": choice_s,
        **more,
        "start": read_json(start.with_suffix(".json"))["start"],
        "end": {**evaluate_whole(config, model, work.whole), **exact_kl(config, model, start)},
    }
    write_atomic(work.folder / "summary.json", encode(summary, indent=1) + "\n")
    print(encode(summary), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("start", "run"):
        one = commands.add_parser(command)
        one.add_argument("name", choices=JOBS)
        one.add_argument("--model", type=Path, help="a model's folder (default: the configuration's)")
        one.add_argument("--data", type=Path, help="a folder with train.jsonl and test.jsonl (default: the hub's)")
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE")
        one.add_argument("--tiny", action="store_true", help="the built-in model and a few problems, on a CPU")
    one.add_argument("--trainer", choices=TRAINERS)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--minutes", type=float, default=5.0)
    one.add_argument("--beside", type=int, default=0, help="how many other runs share the GPU meanwhile")
    for command in ("table", "plot", "page"):
        other = commands.add_parser(command)
        other.add_argument("folders", type=Path, nargs="+")
        other.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.command == "start":
        prepare(args.name, args)
    elif args.command == "run":
        run(args.name, args)
    else:
        getattr(results_page, args.command)(args.folders, args.out)


if __name__ == "__main__":
    main()
