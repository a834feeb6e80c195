"""What bench/results.py makes of finished runs: CSVs, and of these pictures and docs/results.md."""

from __future__ import annotations

import csv
import io
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.base.files import read_json, write_atomic
from keel.eval.statistics import Estimate, estimate

Row = dict[str, Any]
SIDES = {"keel": "Keel, GRPO", "trl": "TRL 1.16, GRPO", "sft": "more SFT"}
JOBS = {"gsm8k": ("gsm8k", "gsm8k_more_sft"), "countdown": ("countdown",)}
TITLES = {
    "gsm8k": "GSM8K, SmolLM2-135M-Instruct",
    "countdown": "Countdown with three and four numbers, SmolLM2-135M-Instruct",
    "kl": "The KL term on Countdown: effect and cost of a penalty",
}
STUDY = "kl"
STUDY_FILES = {
    "points.csv": f"{STUDY}.csv",
    "curves.png": f"{STUDY}-curves.png",
    "frontier.png": f"{STUDY}-frontier.png",
}
BY_HAND = ("summary.txt", "notes.txt")
NOT_RUN = "<!-- not run: START is a model of one's own -->"  # for those who run what a page shows
HEAD = """# Results on a real model

SmolLM2-135M-Instruct, dequantised from 4 bits (`scripts/get_smollm2.py`), on one H200: fp32 weights, bf16 passes.
`python bench/results.py page` makes the tables from the CSVs in `docs/results/`.
"""
LIMITS = {
    "gsm8k": "dr_grpo at a learning rate of 3e-5, temperature 0.8 and β = 0, from 600 SFT steps on the worked "
    "solutions. One sample is the mean of 8 at that temperature. The three runs shared one GPU. SFT got the time that "
    "GRPO needed to choose its problems on top. These were chosen by the start's pass rate on the training split, the "
    "learning rate by pilots on the test split.",
    "countdown": "dr_grpo at a learning rate of 2e-5 with β = 0: the KL is measured, not penalised. The start is the "
    "model after 300 SFT steps, which are in no clock; their number and the rate were chosen by pilots on the "
    "curve's 500 held-out problems. A problem is a set of numbers with a target: the same numbers may be trained with "
    "another target.",
    "race": "One GPU, one job, judged on 500 of the held-out problems. A point of a curve has an error of about 4 "
    "percentage points, so the time to an accuracy is less certain than the time of a step. TRL samples with "
    "transformers, its default, from fp32 weights under autocast, and would be faster with vLLM. It trains in four "
    "passes of 128 completions, Keel in one, and its warm-up begins with a step of rate 0. Loading and evaluating are "
    "not in the clock (`startup_s` in runs.csv). The evaluation before the first step warms up Keel's sampler, not "
    "TRL's. TRL has one seed; Keel's other seeds shared the GPU and are left out.",
    "kl": "80 steps from one start, seven runs at a time on one GPU; 95 % t-intervals over seeds. Accuracy is greedy, "
    "on 500 held-out problems. Old skills: mean of addition, multiplication, the largest of several numbers, "
    "and capitals, in the prompts that SFT used. KL is in nats per token, over the whole vocabulary, on held-out "
    "problems after training. The controllers start at β = 0.01 with a target of 0.02 (dual: smoothing 0.9); the "
    "band is from two thirds to one and a half times the target.",
}


# ------------------------------------------------------------------------------------------------ numbers


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """When a curve of (seconds, accuracy), linear between its points, first reaches the target; None: never."""
    for (t0, a0), (t1, a1) in pairwise(curve):
        if a0 >= target:
            return t0
        if a1 >= target:
            return t0 + (t1 - t0) * (target - a0) / (a1 - a0)
    return curve[-1][0] if curve and curve[-1][1] >= target else None


def race(curves: Mapping[tuple[str, int], Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Keel's and TRL's seconds to the accuracy midway between the start and Keel's end, seed by seed.

    Start and end are means over Keel's seeds of the curves' first and last points.
    """
    own = [curve for (side, _), curve in curves.items() if side == "keel"]
    start, end = (fmean(curve[at][1] for curve in own) for at in (0, -1))
    target = (start + end) / 2
    times = {key: time_to(curve, target) for key, curve in curves.items()}
    return {"start": start, "end": end, "target": target, "times": times}


# ------------------------------------------------------------------------------------------------ CSVs


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV, None as an empty cell; columns in the order in which they first come."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, out.getvalue())


def read_csv(path: Path) -> list[Row]:
    """The rows again: numbers as numbers, empty cells as None."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(lines)]


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text or None


def table(folders: Sequence[Path], out: Path) -> None:
    """runs.csv and curves.csv of all runs below the folders; of a folder of `keel ablate` its points,
    its pictures (reward, KL and β over the steps, reward against KL) and the doctor's verdicts.

    What `out` tells of other runs stays. The tiny ones are left out: they show that the path works and nothing else.
    """
    out.mkdir(parents=True, exist_ok=True)
    runs, curves = list[Row](), list[Row]()
    for folder in folders:
        for file in sorted(folder.rglob("summary.json")):
            summary = read_json(file)
            if "trainer" not in summary or summary["tiny"]:
                continue
            identity = {name: summary[name] for name in ("name", "trainer", "seed", "settings", "beside")}
            if _run_of(identity) in map(_run_of, runs):
                raise SystemExit(f"bench/results.py: {file.parent} is a second {identity}: give one of them")
            plain = {name: value for name, value in summary.items() if name not in (*identity, "start", "end", "tiny")}
            both = {f"{at}_{name}": value for at in ("start", "end") for name, value in summary[at].items()}
            runs.append(identity | plain | both)
            curves += [identity | row for row in read_csv(file.parent / "curve.csv")]
        if (folder / "points.csv").exists():
            for name, kept in STUDY_FILES.items():
                shutil.copyfile(folder / name, out / kept)
            found = [
                (file.parent.name, verdict(read_json(file))) for file in sorted(folder.glob("points/*/findings.json"))
            ]
            write_csv(out / f"{STUDY}-verdicts.csv", [{"run": name, "findings": codes} for name, codes in found])
    made = set(map(_run_of, runs))
    for name, rows in (("runs.csv", runs), ("curves.csv", curves)) if runs else ():
        told = [row for row in read_csv(out / name) if _run_of(row) not in made]
        write_csv(out / name, told + rows)


def _run_of(row: Row) -> tuple[Any, ...]:
    """What tells one run from another, in a row of either CSV."""
    return row["name"], row["trainer"], row["seed"]


def verdict(findings: Sequence[Mapping[str, Any]]) -> str:
    """The doctor's codes of what is worse than a note, or `healthy`."""
    return " ".join(sorted({finding["code"] for finding in findings if finding["severity"] != "note"})) or "healthy"


def curves_of(folder: Path, job: str) -> dict[tuple[str, int], list[Row]]:
    """The points of a job's curves by side and seed."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in read_csv(folder / "curves.csv"):
        if row["name"] in JOBS[job]:
            found.setdefault((row["trainer"], row["seed"]), []).append(row)
    return found


def racers(curves: Mapping[tuple[str, int], list[Row]]) -> dict[tuple[str, int], list[Row]]:
    """Keel's and TRL's curves that had the GPU to themselves; none where one of the two is missing."""
    alone = {key: rows for key, rows in curves.items() if key[0] in ("keel", "trl") and not rows[0]["beside"]}
    if {side for side, _ in alone} != {"keel", "trl"}:
        return {}
    if len(settings := {rows[0]["settings"] for rows in alone.values()}) > 1:
        raise SystemExit(f"bench/results.py: a race of different settings: {sorted(map(str, settings))}")
    return alone


# ------------------------------------------------------------------------------------------------ pictures


def plot(folders: Sequence[Path], out: Path) -> None:
    """Of each job two pictures: results-JOB.png with its seeds, results-JOB-race.png with Keel beside TRL."""
    folder = folders[0]
    accuracy = ("accuracy", "greedy accuracy on held-out problems, 95 % intervals")
    spread = ("no_spread", "groups without spread")
    for job in JOBS:
        curves = curves_of(folder, job)
        own = {key: rows for key, rows in curves.items() if key[0] != "trl"}
        if len({side for side, _ in own}) == 1:
            _draw(own, TITLES[job], out / f"results-{job}.png", [(*accuracy, "step"), (*spread, "step")])
        elif own:  # steps of two kinds
            _draw(own, TITLES[job], out / f"results-{job}.png", [(*accuracy, "wall_s")])
        if alone := racers(curves):
            file = out / f"results-{job}-race.png"
            _draw(alone, f"{TITLES[job]}: one GPU", file, [(*accuracy, "wall_s"), (*accuracy, "step")])


def _draw(
    curves: Mapping[tuple[str, int], list[Row]], title: str, file: Path, panels: Sequence[tuple[str, str, str]]
) -> None:
    """A panel for each (column, title, column of the x axis), a curve a side and seed; intervals of accuracies."""
    from keel.lab.plots.charts import Curve, Panel
    from keel.lab.plots.picture import LegendEntry, write_panels

    sides = [side for side in SIDES if any(key[0] == side for key in curves)]
    parts = {key: SIDES[key[0]] if len(sides) > 1 else f"seed {key[1]}" for key in sorted(curves)}
    colours = {label: number for number, label in enumerate(dict.fromkeys(parts.values()))}

    def panel(column: str, heading: str, x: str) -> Panel:
        drawn = list[Curve]()
        for (side, seed), rows in sorted(curves.items()):
            known = [row for row in rows if row[column] is not None]
            points = [(row[x], 100 * row[column]) for row in known]
            error = [(100 * row["low"], 100 * row["high"]) for row in known] if column == "accuracy" else []
            label, colour = f"{SIDES[side]}, seed {seed}", colours[parts[side, seed]]
            drawn.append(Curve(label, points, colour, error, dashed=side == "sft"))
        return Panel(heading, "%", drawn, x_label="seconds of training" if x == "wall_s" else "step")

    legend = [LegendEntry(label, colour, label == SIDES["sft"]) for label, colour in colours.items()]
    write_panels(file, [panel(*one) for one in panels], title, legend=legend)


def study_means(folder: Path) -> dict[str, Row]:
    """Each point's means over the seeds that ended, with 95 % t-intervals, and how many seeds there are."""
    names = ["accuracy_before", "accuracy_after", "kl_policy_ref", "retention_before", "retention_after"]
    groups: dict[str, list[Row]] = {}
    for row in read_csv(folder / f"{STUDY}.csv"):
        if all(row.get(name) is not None for name in names):
            groups.setdefault(row["point"], []).append(row)
    if all(row.get("share_in_band") is not None for rows in groups.values() for row in rows):
        names.append("share_in_band")  # of a study with a target
    return {
        point: {"seeds": len(rows), **{name: estimate([row[name] for row in rows]) for name in names}}
        for point, rows in groups.items()
    }


# ------------------------------------------------------------------------------------------------ the page


def page(folders: Sequence[Path], out: Path) -> None:
    """docs/results.md out of the CSVs: a section for what there is, and nothing about what there is not."""
    folder = folders[0]
    runs, sections = read_csv(folder / "runs.csv"), list[str]()
    for job, names in JOBS.items():
        if rows := [row for row in runs if row["name"] in names]:
            sections.append(_section(job, rows))
        if alone := racers(curves_of(folder, job)):
            curves = {key: [(row["wall_s"], row["accuracy"]) for row in rows] for key, rows in alone.items()}
            paces = {key: rows[-1]["wall_s"] / rows[-1]["step"] for key, rows in alone.items()}
            sections.append(_race(job, race(curves) | {"steps": paces}))
    if points := study_means(folder):
        sections.append(_study(points, folder))
    if not sections:
        raise SystemExit(f"bench/results.py: {folder} holds no results: run `table` on finished runs first")
    # by hand: what it comes to, and what no figure says (settings that failed, runs that broke off)
    summary, notes = ([file.read_text("utf-8")] if (file := folder / name).exists() else [] for name in BY_HAND)
    write_atomic(out, "\n".join([HEAD, *summary, *sections, *notes]))


def _section(job: str, rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda row: (list(SIDES).index(row["trainer"]), row["seed"]))
    sizes = [
        name for name, value in rows[0].items() if re.fullmatch(r"end_greedy_\d+_numbers", name) and value is not None
    ]
    columns: dict[str, Callable[[Row], object]] = {
        "side": lambda row: SIDES[row["trainer"]],
        "seed": lambda row: row["seed"],
        "minutes": lambda row: f"{row['train_s'] / 60:.1f}",
        "beside it": lambda row: row["beside"],
        "steps": lambda row: row["steps"],
        "doctor": lambda row: row["doctor"] or "–",
        "greedy": lambda row: _share(row, "end_greedy"),
        **{f"of {name.split('_')[2]} numbers": lambda row, name=name: f"{100 * row[name]:.1f} %" for name in sizes},
        "one sample": lambda row: f"{100 * row['end_pass_1']:.1f} %",
        "pass@8": lambda row: _share(row, "end_pass_8"),
        "exact KL": lambda row: f"{row['end_kl_exact']:.4f}",
    }
    of_starts = [{f"end_{name[6:]}": row[name] for name in row if name.startswith("start_")} for row in ordered]
    starts = [row for i, row in enumerate(of_starts) if row not in of_starts[:i]]
    told = [
        name for name in columns if name not in ("side", "seed", "minutes", "beside it", "steps", "doctor", "exact KL")
    ]
    lines: list[list[object]] = [
        ["the start", *(columns[name](row) if name in told else "" for name in list(columns)[1:])] for row in starts
    ]
    lines += [[show(row) for show in columns.values()] for row in ordered]
    names = sorted({row["name"] for row in rows})
    files = ", ".join(f"[{name}.yaml](../configs/results/{name}.yaml)" for name in names)
    commands = "\n".join(["```bash", *map(_command, ordered), "```"])
    problems = f"{rows[0]['end_problems']} held-out problems, 95 % intervals; KL in nats per token to the start."
    parts = [
        f"![curves](images/results-{job}.png)",
        _markdown(list(columns), lines),
        _wrapped(f"{problems} {LIMITS[job]}"),
    ]
    return "\n\n".join([f"## {TITLES[job]}", *parts, f"{files}; FOLDER is the model's:", commands]) + "\n"


def _command(row: Row) -> str:
    """What repeats a run."""
    options = {
        "--trainer": row["trainer"],
        "--seed": row["seed"],
        "--minutes": row["minutes"],
        "--beside": row["beside"],
    }
    shown = " ".join(f"{option} {value}" for option, value in options.items())
    settings = "".join(f" --set {setting}" for setting in (row["settings"] or "").split())
    data = " --data DATA" if row["name"] in JOBS["gsm8k"] else ""
    return f"python bench/results.py run {row['name']} {shown}{settings} --model FOLDER{data} --out DIR"


def _race(job: str, result: Mapping[str, Any]) -> str:
    lines = [
        [SIDES[side], seed, f"{result['steps'][side, seed]:.2f} s", "not reached" if s is None else f"{s:.0f} s"]
        for (side, seed), s in sorted(result["times"].items())
    ]
    start, end, target = (f"{100 * result[name]:.1f} %" for name in ("start", "end", "target"))
    goal = f"{target}, midway between the start ({start}) and Keel's end ({end})"
    table_text = _markdown(["side", "seed", "a step", f"to {target}"], lines)
    picture = f"![race](images/results-{job}-race.png)"
    return f"### Time to accuracy: {goal}\n\n{picture}\n\n{table_text}\n\n{_wrapped(LIMITS['race'])}\n"


def _study(points: Mapping[str, Row], folder: Path) -> str:
    columns: dict[str, Callable[[Row], object]] = {
        "seeds": lambda row: row["seeds"],
        "accuracy": lambda row: _mean(row["accuracy_after"], 100, 1, " %"),
        "exact KL": lambda row: _mean(row["kl_policy_ref"], 1, 4),
        "old skills": lambda row: _mean(row["retention_after"], 100, 1, " %"),
    }
    first = next(iter(points.values()))  # all go on from one start
    before = [_mean(first[name], 100, 1, " %") for name in ("accuracy_before", "retention_before")]
    lines = [["the start", "", before[0], "0", before[1]]]
    if "share_in_band" in first:
        columns["steps in the band"] = lambda row: _mean(row["share_in_band"], 100, 1, " %")
        lines[0].append("")
    lines += [[point, *(show(row) for show in columns.values())] for point, row in points.items()]
    verdicts = read_csv(folder / f"{STUDY}-verdicts.csv")
    codes = Counter(row["findings"] for row in verdicts)
    named = [f"{count} {code}" for code, count in codes.most_common()]
    files = f"[verdicts](results/{STUDY}-verdicts.csv) and [figures of each run](results/{STUDY}.csv)"
    parts = [f"![{name}](results/{STUDY}-{name}.png)" for name in ("curves", "frontier")]
    parts += [_markdown(["point", *columns], lines), _wrapped(LIMITS["kl"])]
    parts += [_wrapped(f"Verdicts of `keel doctor` on {len(verdicts)} runs: {', '.join(named)}: {files}.")]
    parts += ["[kl_beta.yaml](../configs/results/kl_beta.yaml), START is the output of `results.py start countdown`:"]
    command = "keel ablate configs/results/kl_beta.yaml model.name=START warmstart=null optim.microbatch_tokens=16384"
    return "\n\n".join([f"## {TITLES[STUDY]}", *parts, f"{NOT_RUN}\n```bash\n{command} --jobs 7 --out DIR\n```"]) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _mean(value: Estimate, times: float, digits: int, unit: str = "") -> str:
    """A mean over seeds with its 95 % interval, where the seeds differ."""
    margin = "" if not value.margin else f" ± {times * value.margin:.{digits}f}"
    return f"{times * value.mean:.{digits}f}{unit}{margin}"


def _share(row: Row, name: str) -> str:
    return f"{100 * row[name]:.1f} % [{100 * row[f'{name}_low']:.1f}, {100 * row[f'{name}_high']:.1f}]"


def _markdown(head: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
