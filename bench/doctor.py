"""Measure the doctor: how often its first finding names a known fault, and how often it accuses a healthy run.

    python bench/doctor.py                              # every operator of bench/faults, and healthy runs
    python bench/doctor.py --half seen --kind option    # part of them
    python bench/doctor.py --only option/rate-zero --draws 4 --verbose
    python bench/doctor.py --list
    python bench/doctor.py --from results.jsonl         # print the table of earlier results
    python bench/doctor.py --from before.jsonl after.jsonl

A case is one fault operator applied to one healthy subject, or a healthy subject alone. Each case runs in a process of
its own, which is stopped after `--limit` seconds. `--out` appends one line of JSON per finished case. A second call
with the same file continues an interrupted one, as long as Keel and the operators are unchanged. The tested doctor is
the one of the `keel` that Python finds, so PYTHONPATH can select another checkout. A full run exits with status 1 if
recall is below FLOOR or the share of accused healthy runs is above CEILING.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import pkgutil
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from random import seed as seed_global
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # cases run in parallel
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "1000000")  # oneDNN's set-up costs more than such small matrices

import faults
from faults.base import KINDS, LOOKALIKES, OPERATORS, Operator

HEALTHY_KINDS = ("healthy", "healthy log", "look-alike")
SEEN, HELD = "seen", "held"
FLOOR = 0.8  # least share of the held-back faults that the first finding must name
CEILING = 0.05  # largest accepted share of healthy runs with an error or a warning


@dataclass(frozen=True)
class Case:
    """A fault operator, or a harmless look-alike, on the subject of a seed; with neither, the healthy subject."""

    kind: str
    operator: str | None
    seed: int

    @property
    def healthy(self) -> bool:
        return self.kind in HEALTHY_KINDS

    @property
    def name(self) -> str:
        return f"{self.operator or self.kind}#{self.seed}"


@dataclass(frozen=True)
class Result:
    """The doctor's output for one case: the codes found, in order and with severities, or why there are none."""

    case: Case
    codes: tuple[str, ...] = ()  # the codes that count as naming the fault
    half: str = ""
    findings: tuple[tuple[str, str], ...] = ()
    refused: str = ""  # the message that refused the configuration and names the broken option
    error: str = ""  # a traceback, a refusal that names something else, or the time limit
    seconds: float = 0.0
    version: str = ""  # digest of Keel's files and the operators

    @property
    def accused(self) -> tuple[str, ...]:
        """The codes of errors and warnings, in order."""
        return tuple(code for code, severity in self.findings if severity != "note")

    @property
    def first(self) -> bool:
        return bool(self.refused) or (self.accused[:1] != () and self.accused[0] in self.codes)

    @property
    def first_code(self) -> bool:
        """Whether the first finding has the first of the operator's codes, which describes the fault best."""
        return self.accused[:1] == self.codes[:1] != ()

    @property
    def listed(self) -> bool:
        return bool(self.refused) or any(code in self.codes for code in self.accused)

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: str) -> Result:
        row = json.loads(line)
        findings = tuple((code, severity) for code, severity in row.pop("findings"))
        return cls(Case(**row.pop("case")), tuple(row.pop("codes")), findings=findings, **row)


# ------------------------------------------------------------------------ cases


def register() -> Mapping[str, Operator]:
    """All operators of the package, sorted by module name and then by position in the module."""
    for module in sorted(info.name for info in pkgutil.iter_modules(faults.__path__)):
        importlib.import_module(f"faults.{module}")
    return OPERATORS


def half_of(operator: Operator) -> str:
    return HELD if operator.held_back else SEEN


def seed_of(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


@functools.cache
def version() -> str:
    """A digest of Keel's files and the operators. Results of another version are not reused."""
    import keel

    total = hashlib.sha256()
    for root in (Path(keel.__file__).parent, Path(faults.__path__[0])):
        for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".yaml")):
            total.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return total.hexdigest()[:12]


def chosen(given: argparse.Namespace) -> list[Operator]:
    """The operators that the command line selects."""
    return [
        operator
        for operator in register().values()
        if given.half in ("all", half_of(operator))
        and (not given.kind or operator.kind in given.kind)
        and (not given.only or operator.name in given.only)
    ]


def is_part(given: argparse.Namespace) -> bool:
    return bool(given.kind or given.only or given.half != "all")


def cases(given: argparse.Namespace) -> list[Case]:
    """The cases of all selected operators and healthy subjects, shuffled so that a partial run covers every kind."""
    drawn = [
        Case(operator.kind, operator.name, seed_of(given.seed, operator.name, draw))
        for draw in range(given.draws)
        for operator in chosen(given)
    ]
    count = given.healthy if given.healthy is not None else 0 if is_part(given) else 60
    for kind in HEALTHY_KINDS[:2]:
        drawn += [Case(kind, None, seed_of(given.seed, kind, draw)) for draw in range(count)]
    if count:
        drawn += [Case("look-alike", name, seed_of(given.seed, name)) for name in LOOKALIKES]
    return sorted(drawn, key=lambda case: case.seed)


def subject_of(case: Case, fits: Callable[[Any], bool] = lambda subject: True) -> Any:
    """A healthy configuration or, for log operators, a healthy log."""
    if not case.kind.endswith("log"):
        return importlib.import_module("faults.healthy").healthy(case.seed, fits)
    logs = importlib.import_module("faults.logs")
    for attempt in range(1000):  # some metrics are logged by one trainer only, and rarely
        subject = logs.healthy_log(case.seed + attempt)
        if fits(subject):
            return subject
    raise ValueError(f"no healthy log fits {case.name}")


def look(case: Case) -> Result:
    """Run one case and record any exception."""
    operator = OPERATORS.get(case.operator or "")
    codes, half = (operator.codes, half_of(operator)) if operator else ((), "")
    began = time.monotonic()
    findings: tuple[tuple[str, str], ...] = ()
    refused = error = ""
    try:
        change = operator or LOOKALIKES.get(case.operator or "")
        subject = subject_of(case, change.fits) if change else subject_of(case)
        broken = change.apply(subject, Random(case.name)) if change else subject
        began = time.monotonic()
        findings, refused, error = examine(subject, broken, operator.refusal if operator else "")
    except Exception:
        error = traceback.format_exc()
    return Result(case, tuple(codes), half, findings, refused, error, round(time.monotonic() - began, 2), version())


def examine(subject: Any, broken: Any, words: str = "") -> tuple[tuple[tuple[str, str], ...], str, str]:
    """Return the findings in display order, a refusal that names the broken option, and any other refusal."""
    from keel.base.errors import KeelError

    try:
        diagnosis = _preflight(broken) if isinstance(broken, dict) else _examine_log(broken)
    except KeelError as refusal:
        named = (bool(words) and words in str(refusal)) or names_change(str(refusal), subject, broken)
        return (), str(refusal) if named else "", "" if named else f"refused: {refusal}"
    return tuple((row["code"], row["severity"]) for row in diagnosis.as_dict()["findings"]), "", ""


def _preflight(config: dict[str, Any]) -> Any:
    import torch

    from keel.config import load_config
    from keel.doctor.preflight import preflight

    checked = load_config(config)
    seed_global(checked.run.seed)  # for rewards and scorers that use the global generators
    torch.manual_seed(checked.run.seed)
    return preflight(checked)


def _examine_log(log: Any) -> Any:
    return importlib.import_module("faults.logs").examine_log(log)


def changes(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The options that differ, as dotted keys with their new values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from changes(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(after, dict) and before is None:
        for key, value in after.items():
            yield from changes(None, value, f"{path}.{key}")
    elif before != after:
        yield path, after


def names_change(message: str, before: Any, after: Any) -> bool:
    """Whether a refusal names a broken option by its dotted key, or at least by its section and name."""
    keys = {".".join(path.split(".")[-2:]) for path, _ in changes(before, after)}
    return any(re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", message) for key in keys if "." in key)


# ------------------------------------------------------------------------ processes


@dataclass
class Child:
    """A process that runs one case."""

    case: Case
    process: Any
    answer: Connection
    began: float = field(default_factory=time.monotonic)


def _child(case: Case, answer: Connection) -> None:
    """Run one case in a child process. Output of the case is discarded; only the result is returned."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answer.send(look(case))
    answer.close()
    os._exit(0)  # do not wait for threads that the case left running


def run(todo: Sequence[Case], processes: int, limit: float) -> Iterator[Result]:
    """Yield the results as they finish. Each case runs in a fork of this process, which has imported everything."""
    context = multiprocessing.get_context("fork")
    waiting, children = list(reversed(todo)), list[Child]()
    while waiting or children:
        while waiting and len(children) < processes:
            case = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, send))
            process.start()
            send.close()
            children.append(Child(case, process, receive))
        ready = wait([child.answer for child in children], timeout=0.5)
        for child in list(children):
            spent = time.monotonic() - child.began
            if child.answer not in ready and spent < limit:
                continue
            children.remove(child)
            yield _answer(child, spent, limit)


def _answer(child: Child, spent: float, limit: float) -> Result:
    result = None
    with contextlib.suppress(EOFError):
        result = child.answer.recv() if child.answer.poll() else None
    if result is None:
        why = f"not done after {limit:g} s" if spent >= limit else "the process ended without a result"
        operator = OPERATORS.get(child.case.operator or "")
        codes, half = (operator.codes, half_of(operator)) if operator else ((), "")
        result = Result(child.case, tuple(codes), half, error=why, seconds=round(spent, 2), version=version())
        child.process.kill()
    child.process.join()
    child.answer.close()
    return result


# ------------------------------------------------------------------------ table


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    kind: str
    cases: int
    first: int  # named by the first finding, refusals included
    first_code: int  # of these, how many have the operator's first code
    listed: int
    refused: int
    errors: int


def recall(results: Iterable[Result]) -> list[Row]:
    """Recall by kind of fault, with a total in the last row."""
    faulty = [result for result in results if not result.case.healthy]
    kinds = [kind for kind in KINDS if any(result.case.kind == kind for result in faulty)]
    return [
        Row(
            kind,
            len(rows),
            sum(result.first for result in rows),
            sum(result.first_code for result in rows),
            sum(result.listed for result in rows),
            sum(bool(result.refused) for result in rows),
            sum(bool(result.error) for result in rows),
        )
        for kind in [*kinds, "all"]
        if (rows := [result for result in faulty if kind in (result.case.kind, "all")])
    ]


def accusations(results: Iterable[Result]) -> list[tuple[str, int, int]]:
    """Healthy cases by kind: the number of cases, and how many got an error, a warning, or no diagnosis at all."""
    whole = [result for result in results if result.case.healthy]
    return [
        (kind, len(rows), sum(bool(result.accused or result.error or result.refused) for result in rows))
        for kind in HEALTHY_KINDS
        if (rows := [result for result in whole if result.case.kind == kind])
    ]


def share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.0f} %)" if whole else "0"


def table(results: Sequence[Result]) -> str:
    """The tables of recall by half and kind, and of false alarms on healthy cases."""
    lines = []
    for half in (SEEN, HELD, "all"):
        rows = recall(result for result in results if half in (result.half, "all"))
        if not rows or (half == "all" and len({result.half for result in results if result.half}) < 2):
            continue
        title = {SEEN: "operators that are seen", HELD: "operators that are held back", "all": "all operators"}[half]
        heads = ("named first", "but refusals", "by first code", "in the list")
        lines += [f"{title:<28} {'cases':>6} {' '.join(f'{head:>14}' for head in heads)} {'refused':>8} {'errors':>7}"]
        for row in rows:
            diagnosed = row.cases - row.refused
            shares = (
                share(row.first, row.cases),
                share(row.first - row.refused, diagnosed),
                share(row.first_code, diagnosed),
                share(row.listed, row.cases),
            )
            cells = " ".join(f"{cell:>14}" for cell in shares)
            lines += [f"  {row.kind:<26} {row.cases:>6} {cells} {row.refused:>8} {row.errors:>7}"]
        lines += [*by_operator(result for result in results if half in (result.half, "all")), ""]
    for kind, count, accused in accusations(results):
        lines += [f"{kind + ' runs accused':<28} {accused} of {count}"]
    seconds = sorted(result.seconds for result in results)
    if seconds:
        lines += [f"seconds a case: median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}"]
    return "\n".join(lines)


def by_operator(results: Iterable[Result]) -> list[str]:
    """How many operators are named in all of their draws and how many in none, if operators have several draws."""
    draws: dict[str, list[bool]] = {}
    for result in results:
        if result.case.operator is not None and not result.case.healthy:
            draws.setdefault(result.case.operator, []).append(result.first)
    if max(map(len, draws.values()), default=0) < 2:
        return []
    always, never = sum(map(all, draws.values())), sum(not any(firsts) for firsts in draws.values())
    return [f"  of {len(draws)} operators {always} are named first in all draws, {never} in none"]


def misses(results: Sequence[Result]) -> str:
    """One line for each fault that the first finding does not name, and for each healthy case with a false alarm."""
    lines = []
    for result in results:
        failed = not result.first if not result.case.healthy else bool(result.accused or result.error or result.refused)
        if failed:
            last = result.error.strip().splitlines()[-1][:160] if result.error else ""
            shown = ", ".join(result.accused[:4]) or last or result.refused[:160] or "nothing"
            wanted = f" instead of {' or '.join(result.codes)}" if result.codes else ""
            lines.append(f"{result.case.name} [{result.half or '-'}]: {shown}{wanted}")
    return "\n".join(sorted(lines))


def comparison(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Both tables, and the cases in both whose outcome differs."""
    lines = ["before", table(before), "", "after", table(after), ""]
    earlier = {result.case: result for result in before}
    for result in after:
        other = earlier.get(result.case)
        if other is not None and _outcome(other) != _outcome(result):
            lines.append(f"{result.case.name}: {_outcome(other)} → {_outcome(result)}")
    return "\n".join(lines)


def _outcome(result: Result) -> str:
    if result.case.healthy:
        return "accused" if result.accused or result.error or result.refused else "silent"
    return "refused" if result.refused else "first" if result.first else "listed" if result.listed else "missed"


def read(path: str) -> list[Result]:
    """Read the results of a file and skip an incomplete last line."""
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    return [Result.of(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def cut_half_line(path: str) -> None:
    """Remove an incomplete last line, so that the next result does not continue it."""
    if Path(path).is_file():
        data = Path(path).read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def shortfalls(results: Sequence[Result]) -> list[str]:
    """One line for each limit, FLOOR or CEILING, that the results miss."""
    lines = []
    rows = recall(result for result in results if result.half == HELD)
    if rows and rows[-1].first < FLOOR * rows[-1].cases:
        lines.append(
            f"below the floor: {share(rows[-1].first, rows[-1].cases)} of the held back, {FLOOR:.0%} are asked"
        )
    count, accused = (sum(column) for column in zip((0, 0), *(row[1:] for row in accusations(results)), strict=True))
    if accused > CEILING * count:
        lines.append(f"above the ceiling: {share(accused, count)} of the healthy accused, {CEILING:.0%} are allowed")
    return lines


def listing(operators: Sequence[Operator]) -> str:
    """Every operator with its half and codes, then the number of operators of each kind."""
    lines = [f"{o.name:<40} {half_of(o):<5} {', '.join(o.codes)}  {o.breaks}" for o in operators]
    for kind in KINDS:
        members = [operator for operator in operators if operator.kind == kind]
        if members:
            lines.append(f"{kind}: {len(members)}, of which {sum(o.held_back for o in members)} held back")
    return "\n".join([*lines, f"all: {len(operators)}, of which {sum(o.held_back for o in operators)} held back"])


# ------------------------------------------------------------------------ command line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=(SEEN, HELD, "all"), default="all", help="which half of the operators")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only operators of this kind")
    parser.add_argument("--only", action="append", help="only the operator of this name")
    parser.add_argument("--draws", type=int, default=1, help="subjects an operator is applied to")
    parser.add_argument(
        "--healthy", type=int, help="healthy runs, as many logs, and the look-alikes; default 60, 0 of a part"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--processes", type=int, default=2, help="cases looked at beside each other")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a case may take")
    parser.add_argument("--out", help="JSONL of results; cases that are in it already are not looked at again")
    parser.add_argument("--from", dest="results", nargs="+", help="show results, or compare two files of them")
    parser.add_argument("--list", action="store_true", help="the operators, and nothing else")
    parser.add_argument("--verbose", action="store_true", help="also every miss and every accusation")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        print(listing(chosen(given)))
        return 0
    if given.results:
        several = [read(path) for path in given.results]
        print(comparison(*several[:2]) if len(several) > 1 else table(several[0]))
        if given.verbose:
            print(misses(several[-1]))
        return 0
    _prepare()
    todo = cases(given)
    if given.out:
        cut_half_line(given.out)
    done = {row.case: row for row in (read(given.out) if given.out else []) if row.version == version()}
    results = [done[case] for case in todo if case in done]
    todo = [case for case in todo if case not in done]
    out = open(given.out, "a", encoding="utf-8") if given.out else contextlib.nullcontext()  # noqa: SIM115
    with out as file, _progress(len(todo)) as advance:
        for result in run(todo, given.processes, given.limit):
            results.append(result)
            if file is not None:
                file.write(result.line() + "\n")
                file.flush()
            advance()
    print(table(results))
    if given.verbose:
        print(misses(results))
    missed = [] if is_part(given) else shortfalls(results)
    for line in missed:
        print(line)
    return 1 if missed else 0


def _prepare() -> None:
    """Import what every case needs before forking. Set one thread per process, since cases run in parallel."""
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    importlib.import_module("keel.doctor.preflight")
    importlib.import_module("keel.doctor.examine")
    importlib.import_module("transformers")
    importlib.import_module("peft")
    register()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No auto-refresh thread: a fork would inherit the locks that the thread holds and wait for them forever.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("cases", total=total)
        yield lambda: progress.update(bar, advance=1, refresh=True)


if __name__ == "__main__":
    sys.exit(main())
