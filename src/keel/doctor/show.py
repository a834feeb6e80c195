"""docs/doctor.md from the data that the doctor itself goes by: `python -m keel.doctor.show > docs/doctor.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console

from keel.doctor.causes import CAUSES
from keel.doctor.diagnosis import Diagnosis
from keel.doctor.display import SHOWN, show_diagnosis
from keel.doctor.findings import CODES, finding, propose
from keel.doctor.names import SHORT, TRAINERS, PeerTrainer
from keel.doctor.suspects import SUSPECTS, Suspect
from keel.doctor.thresholds import shipped_thresholds

PAGE = """\
# What is wrong, and how that is decided

`keel doctor` looks at a run, or at a configuration before it is run, and says what is wrong, worst first: a code, a
severity, the evidence with its figures and steps, the likely cause, and the option to change. This page is generated
from the tables that the doctor goes by: `python -m keel.doctor.show > docs/doctor.md`.

<!-- not run: runs and logs of others; tests/doctor runs each kind -->
```bash
keel doctor runs/default                     # a run of Keel's, finished or running
keel doctor configs/default.yaml             # a configuration: the preflight, on one small batch
keel doctor trl-output/                      # TRL: trainer_state.json of the folder or of its checkpoints
keel doctor tensorboard/                     # TensorBoard files of Keel, TRL, verl, OpenRLHF, NeMo-RL or prime-rl
keel doctor wandb/run-20260101-abc/          # a run folder of W&B; an exported chart or history is a table
keel doctor verl.log                         # what a trainer printed, a line a step
keel doctor log.csv --map step=it,kl=my_kl   # a table: CSV or JSON lines
```

The verdict and the findings come first, in twenty lines: up to {shown} errors and warnings, as many as have room, each
with its code, its evidence and what to change, and where lines are left also its cause and what it explains. No
sentence is cut: a first finding that needs more lines gets them. Then what was tried and found sound, and how much
could not be checked. An area of a log's checks is sound if nothing was found in it, not even a note, and half of it or
more could be decided: "reward (5 of 7)" says how much. A folder that is no run itself but holds some is refused, with
their names, newest first.

```text
{example}
```

| option | what it does |
| --- | --- |
| `--verbose` | prints all of it: findings in full, hypotheses, what could not be checked and why, figures and masks |
| `--html FILE` | writes all of it as a self-contained page; a run's own report.html has it too |
| `--quick` | for a configuration: a smaller batch, and without {left_out}, which are listed as not checked |
| `--json` | in the place of text, so without `--verbose`: \
prints `findings` (a list of objects with `code`, `severity`, `evidence`, `cause`, `advice`, and \
`options`, the advice's proposals as lists of overrides), \
`hypotheses`, `unchecked`, `notes` and `raised_thresholds` |
| `--map kl=COLUMN,…` | names the columns of a table, or the tags of a TensorBoard folder |
| `--threshold NAME=VALUE` | another value for a threshold, shown in the output if it makes an alarm less sensitive |
| `--write` | keeps the findings in `findings.json` of a Keel run; nothing is written otherwise |

Exit status: 0 healthy (notes allowed), 1 errors or warnings, 2 could not run. A run writes its own `findings.json` when
it ends, the codes go into `summary.json`, and the report shows them at the top. In Python:
`keel.doctor.examine.examine("runs/default")` and
`keel.doctor.preflight.preflight(load_config("configs/default.yaml"))` return a `Diagnosis`.

What could not be decided is listed with the reason: a log without KL says nothing about KL, and the doctor says that it
does not. A run's log shows symptoms; where several causes have the same one, the finding names them and the preflight
tells them apart by experiment.

## The preflight

`keel doctor CONFIG` builds the real model, task, engine and reference and runs one experiment after another on one
small batch, each for one cause. `OMP_NUM_THREADS=1 keel doctor configs/default.yaml warmstart=null`, the tiny
model without its warm start, took 18 s of processor time on an ARM server (`time`), loading Python's libraries
included; `python bench/preflight.py` prints the time of each experiment. A configuration's warm start comes on top. It
is cut after {warmstart_s:g} s if it would take more than twice as long; the short output says so too.

A warm start that ends is kept in `$XDG_CACHE_HOME/keel/warmstarts` (`~/.cache/keel/warmstarts` without that variable).
`keel doctor`, `keel doctor --quick` and `keel train` take it from there. The result is the same to the last bit: an
entry is found by the initial weights, every example, the options, the numbers of its first step, which is always made,
Keel's source, versions and settings of the libraries, and the CPU. Its checksum is verified. Beyond 1 GiB the entries
that were used least recently are removed. Nothing is kept on a GPU, over several processes, with `model.compile`,
dropout or modules of your own. `KEEL_WARMSTART_CACHE=0` switches the cache off.

Where a pass over the
batch is expensive (models of 100M parameters on a CPU), experiments that run pass after pass ({passes}) get fewer
completions, cut where they are long, and a note says so; what is judged of completions sees all of them.

With `rollout.engine=vllm` the sampler of the run is started once, or its server is asked, and closed at the end; a
server keeps the weights that it was sent last. What the sampler shows of itself is among the notes ("tried and found
sound: weights read back: all 21 tensors of the sampler are the policy's"). A server of another model or tokenizer, or
of another base under an adapter, is `sampler/other-model`, and the only finding, since nothing can be sampled; one that
does not take over the weights is `sampler/stale`, whatever it says of them: the draws are looked at too.

{probes}

## Hypotheses

The last table lists what was suspected in two investigations of failed runs: H01 to H08 of a multi-hop run that did not
learn, E01 on the chain by which a chess run blew up. Each is confirmed, ruled out, or not testable here, with the
figure that decides, what it interacts with, and what to do next. A finding confirms. That nothing was found rules
nothing out: it takes a figure on the safe side of its threshold, by any one way of the fourth column; a row whose
codes could not be checked stays open. H03 asks what the KL term is, which no batch has to decide: the
[table of proven pairings](kl.md) says along which gradient the configured one pulls, and the preflight measures that
the code does so. Plain k3 in the loss pulls along ∇KL(ref‖policy) and so confirms it: `kl.gradient=auto` is the other.

{hypotheses}

## Causes and symptoms

A finding whose cause was found too is a note that begins "explained by CAUSE": it is still there, and steps back. The
cause is as grave as the gravest that it explains. Rows are followed through what was found; a cause that is itself a
note or a guess explains nothing, none explains what concerns more of the batch than itself, and a case that is milder
than its code's usual one explains nothing graver. What no row connects stays: two faults are two findings.
In a log, what updates do to a policy is put down to them only where the first step did not show it.

{causes}

## Codes

Worst first: errors before warnings before notes, and among equals a cause before what it causes. Severity is the usual
one; a check may find a milder case. Names in backticks are thresholds of the next table.

{codes}

## Thresholds

Each alarm lies above or below its value. Other values go into a configuration, `doctor: {{thresholds: {{kl_over_budget:
0.4}}}}`, or behind `--threshold`. One that makes an alarm less sensitive is itself a finding, the note
`doctor/threshold-raised`, in the output, in `findings.json` and so in the report. A run's guards, its findings and its
report go by the same values; `guards.grad_spike` is a run's own value of `grad_spike` (where both are given they must
agree), and `kl.budget.max` per token is judged in the place of `kl_over_budget`.

{thresholds}

## Logs of other trainers

Metrics are read under their writer's names, with or without `train/` before them. What a log does not hold is listed
as not checked.

Whose log it is shows in the names, also in TensorBoard files, tables and exports of W&B, and advice is given in that
trainer's own options. TRL's options come from `training_args.bin` beside the log, which is read as data: nothing in it
is run. Rows with `other/` are read and judged by no check.

{trainers}

`--map` takes these names, or Keel's own metric names.

{short}
"""


def doctor_page() -> str:
    """docs/doctor.md."""
    from keel.doctor.keel_subject import WARMSTART_S
    from keel.doctor.measures import MEASURES

    codes = ((f"`{c.name}`", c.severity, c.meaning, c.decided) for c in CODES.values())
    limits = (
        (f"`{t.name}`", f"{t.alarm} {t.value:g}", t.unit, t.source, t.reason) for t in shipped_thresholds().values()
    )
    tried = ((measure.name, measure.about) for measure in MEASURES)
    rows = (
        (f"{row.name} {row.title}", row.priority, _confirmed(row), _rule_outs(row), row.interacts) for row in SUSPECTS
    )
    causes = (
        (f"`{code}`", row.why, *map(_codes, (row.explains, row.in_logs, row.later))) for code, row in CAUSES.items()
    )
    return PAGE.format(
        example=_example(),
        left_out=", ".join(m.name for m in MEASURES if not m.quick),
        warmstart_s=WARMSTART_S,
        shown=("no", "one", "two", "three")[SHOWN],
        passes=", ".join(m.name for m in MEASURES if m.passes),
        causes=_table(("cause", "why", "explains", "in a log", "in a log, later"), causes),
        probes=_table(("experiment", "what it does"), tried),
        hypotheses=_table(("hypothesis", "priority", "confirmed by", "ruled out by", "interacts with"), rows),
        codes=_table(("code", "severity", "what it means", "how it is decided"), codes),
        thresholds=_table(("threshold", "alarm", "unit", "source", "reason"), limits),
        trainers="\n\n".join(map(_trainer, TRAINERS.values())),
        short=_table(("--map", "Keel"), ((f"`{theirs}`", f"`{ours}`") for theirs, ours in SHORT.items())),
    )


def _example() -> str:
    """What is printed of one finding."""
    shown = finding(
        "optim/lr-too-high",
        "one update at optim.learning_rate=0.1 takes the policy 2.09 nats per token from where it was (over 0.05)",
        "the step is longer than the region in which the advantages were measured",
        propose("set {}", {"optim.learning_rate": 0.0007}),
    )
    names = ("collection", "masks", "scoring", "sampler", "weight sync", "reference")
    file = StringIO()
    console = Console(file=file, width=96, color_system=None)
    show_diagnosis(Diagnosis((shown,), unchecked=("eval/train-gap: …",), sound=names), console, "preflight of default")
    return file.getvalue().rstrip()


def _codes(codes: Iterable[str]) -> str:
    return ", ".join(f"`{code}`" for code in codes)


def _confirmed(row: Suspect) -> str:
    """The codes; and the formula, where it pulls elsewhere."""
    return _codes(row.codes) + "; or a formula whose gradient is another than ∇KL(policy‖ref)" * row.by_formula


def _rule_outs(row: Suspect) -> str:
    """What rules a row out: alternatives, each a list of figures that all have to be safe."""

    def figure_text(name: str, side: str, limit: str | float) -> str:
        return f"`{name}` {side} {f'`{limit}`' if isinstance(limit, str) else f'{limit:g}'}"

    first = "the configured formula, before and after a run alike; where it is not known " if row.by_formula else ""
    return first + "; or ".join(
        " and ".join(figure_text(*figure) for figure in rule_out.figures) for rule_out in row.ruled_out_by
    )


def _trainer(trainer: PeerTrainer) -> str:
    """What a trainer logs, and the options that it calls otherwise."""
    rows = ((f"`{theirs}`", f"`{name.keel}`", name.unit, name.per) for theirs, name in trainer.metrics.items())
    options = ", ".join(f"`{theirs}` ({ours})" for theirs, ours in trainer.options.items())
    table = _table((trainer.name, "Keel", "unit", "mean over, or figure of, one"), rows)
    return f"{trainer.about}\n\n{table}\n\nOptions of {trainer.name}: {options}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    print(doctor_page(), end="")
