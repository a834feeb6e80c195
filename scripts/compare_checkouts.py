"""Prove that two checkouts behave alike: record what a user sees of each, to the last digit, and compare the records.

    python scripts/compare_checkouts.py record ../keel-main golden/before
    python scripts/compare_checkouts.py record . golden/after
    python scripts/compare_checkouts.py compare golden/before golden/after --meant meant.yaml
    python scripts/compare_checkouts.py both ../keel-main .

Recorded are `--print-config` of every configuration, the points of every study, `--help` of every command, and what
`golden.yaml` lists: bad inputs with their lines, commands, short runs with all of their files. Times, speeds,
memory, dates, versions and paths are masked; all other numbers are kept as they were written. The order of keys in JSON
files is not compared. Records are text, one file an item; keep them outside the repository.

Every command runs in a process of its own, so that it sees what a user's `keel` sees; it is forked from one that has
imported what `--print-config` imports and run none of it, so that it starts at once. One thread each: sums are then
always in the same order.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import fnmatch
import gc
import hashlib
import html.parser
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ITEMS = Path(__file__).with_name("golden.yaml")
ABOUT = "about.json"  # of the record itself, and not compared
MASK = "…"
LIMIT_S = 240  # of a command; one that hangs is killed, and its status tells so
IMPORTED = ("torch", "transformers", "peft", "numpy", "pydantic", "typer", "rich.console", "tokenizers")
# Offline, so that a name on a hub fails at once and alike; one hash seed, so that a set's order is no difference.
ENVIRONMENT = {
    "COLUMNS": "120",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "CUDA_VISIBLE_DEVICES": "",
}


# --- what is masked ---------------------------------------------------------------------------------------------------

# `sha256` is the seal of a checkpoint's record, which holds times.
CHANGING_KEY = re.compile(r"time|wall_s|seconds|rows_per_minute|keel|commit|sha256|(time|speed|memory)/.*|.*\brng\.pt")
CHANGING_CHARTS = ("Time per step", "Speed", "Memory")
CHANGING_TEXT = (
    (re.compile(r"\d[\d.,]*(e-?\d+)? (s|ms|seconds?|minutes?|hours?)\b"), rf"{MASK} \2"),
    (re.compile(r"(tok/s|ETA) \S+( \d+ ?\w+)*"), rf"\1 {MASK}"),
    (re.compile(r"\+\d+:\d\d(:\d\d)?\b"), f"+{MASK}"),
    (re.compile(r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?)?( UTC|Z)?"), f"{MASK}-date"),
    (re.compile(r"\b([Kk]eel) \d+\.\d+\.\d+[\w.+-]*"), rf"\1 {MASK}"),
    (re.compile(r"events\.out\.tfevents\.\S+"), f"events.out.tfevents.{MASK}"),
)
WARMSTART_PATH = re.compile(r"^warmstart:\n(?:  .*\n)*?  path: <", re.MULTILINE)
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
BAR = re.compile(r"[^\r\n]*\d+%\|[^\r\n]*[\r\n]?")  # a library's progress bar
FRAMES = re.compile(r"(Traceback \(most recent call last\):\n)(?:[ \t].*\n)+")


@dataclass(frozen=True)
class Masks:
    """What is replaced in a text: `paths` by their names; times and versions too where `times` is set."""

    paths: Mapping[str, str] = field(default_factory=dict)
    times: bool = True

    def text(self, text: str) -> str:
        """The text with the same words wherever and whenever it was written.

        Where a number was masked, spaces are folded: columns are as wide as what stands in them.
        """
        for path in sorted(self.paths, key=len, reverse=True):
            text = text.replace(path, self.paths[path])
        text = FRAMES.sub(rf"\1  {MASK}\n", ADDRESS.sub(f"0x{MASK}", BAR.sub("", text)))
        return "\n".join(map(self._line, text.split("\n"))) if self.times else text

    def stream(self, text: str) -> str:
        """What a command printed: data where all of it is JSON, else text."""
        if self.times and text.lstrip()[:1] in ("{", "["):
            with suppress(ValueError):
                return json.dumps(self.data(json.loads(text)), ensure_ascii=False, indent=2) + "\n"
        return self.text(text)

    def data(self, value: Any, key: str = "") -> Any:
        """JSON data with the values of changing keys masked, and every text in it."""
        if isinstance(value, dict):
            return {name: self.data(item, name) for name, item in value.items()}
        if value is not None and CHANGING_KEY.fullmatch(key):
            return MASK
        if isinstance(value, list):
            return [self.data(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def _line(self, line: str) -> str:
        masked = line
        for pattern, replacement in CHANGING_TEXT:
            masked = pattern.sub(replacement, masked)
        return line if masked == line else re.sub(r"[ ─]{2,}", " ", masked)


def keys_only(value: Any) -> Any:
    """The data with every value masked: what is there, not what it says."""
    return {name: keys_only(item) for name, item in value.items()} if isinstance(value, dict) else MASK


def json_lines(value: Any) -> str:
    """JSON with one entry a line at the outer two levels and the rest in one line each, so that a diff is short."""

    def compact(item: Any) -> str:
        return json.dumps(item, ensure_ascii=False, sort_keys=True)

    if isinstance(value, dict):
        rows = []
        for name, item in sorted(value.items()):
            if isinstance(item, dict) and item:
                rows += [f"{name}:", *(f"  {inner}: {compact(item[inner])}" for inner in sorted(item))]
            else:
                rows.append(f"{name}: {compact(item)}")
        return "\n".join(rows) + "\n"
    if isinstance(value, list):
        return "\n".join(map(json_lines, value)) or "[]\n"
    return compact(value) + "\n"


class _Page(html.parser.HTMLParser):
    """Texts of a page, one a line; numbers inside charts are left out, their data is read from the page's script."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.charts = ""
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "svg"):
            self._inside.append("charts" if ("id", "charts") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "svg") and self._inside:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        inside, text = (self._inside[-1] if self._inside else ""), " ".join(data.split())
        if inside == "charts":
            self.charts += data
        elif text and inside not in ("script", "style") and not (inside == "svg" and re.fullmatch(r"[\d.e+−-]+", text)):
            self.lines.append(text)


def page_text(page: str, masks: Masks) -> str:
    """What a report says and draws; versions, its last block, are left out."""
    parser = _Page()
    parser.feed(page)
    lines = parser.lines
    if "Versions" in lines:
        lines = lines[: len(lines) - lines[::-1].index("Versions")]
    charts = json.loads(parser.charts)["charts"] if parser.charts.strip() else []
    for chart in charts:
        if chart["title"].startswith(CHANGING_CHARTS):
            chart["series"] = [series["label"] for series in chart["series"]]
    return masks.text("\n".join(lines) + "\n") + "\n" + json_lines(charts)


# --- running commands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """Commands that run one after the other in one folder, and the run folder inside it that is recorded, if any."""

    name: str
    commands: Sequence[str]
    run: str | None = None
    times: bool = True  # whether times are masked in what is printed


def serve(jobs: int, warm: bool) -> None:
    """Run the sequences of commands that come on stdin, a line of JSON a batch; answer each command with a line.

    This process calls no part of Keel: every command is a fork of it. `warm`: with modules imported beforehand.
    """
    for name in IMPORTED if warm else ():
        with suppress(ImportError):
            importlib.import_module(name)
    for name in modules_of(["train", "default", "--print-config"]) if warm else ():
        with suppress(Exception):  # what cannot be imported fails in the commands that need it, where it is seen
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported is not looked at again when a child ends
    print(json.dumps({"keel": getattr(importlib.util.find_spec("keel"), "origin", None)}), flush=True)
    for line in sys.stdin:
        waiting: list[list[dict[str, Any]]] = json.loads(line)
        running: dict[int, tuple[list[dict[str, Any]], float]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                sequence = waiting.pop(0)
                pid = os.fork()
                if pid == 0:
                    run_command(sequence[0])
                running[pid] = (sequence, time.monotonic())
            pid, ended = os.wait()
            sequence, began = running.pop(pid)
            told = {"status": os.waitstatus_to_exitcode(ended), "seconds": round(time.monotonic() - began, 2)}
            print(json.dumps({**sequence[0], **told}), flush=True)
            if len(sequence) > 1:
                waiting.insert(0, sequence[1:])


def modules_of(words: Sequence[str]) -> list[str]:
    """The modules that a command of `keel` imports, as a fork of this process that runs it tells."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        silent = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(silent, number)
        sys.argv = ["keel", *words]
        with suppress(BaseException):
            from keel.cli import main

            main()
        os.write(writing, json.dumps([name for name in sys.modules if name != "__main__"]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as names:
        text = names.read()
    os.wait()
    return json.loads(text) if text else []


def run_command(command: Mapping[str, Any]) -> None:
    """`keel` with these words, or `python -m MODULE`, in this process, which ends with its exit status."""
    signal.alarm(command["limit"])
    os.chdir(command["folder"])
    for number, path in ((0, os.devnull), (1, command["stdout"]), (2, command["stderr"])):
        handle = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = ["keel", *command["words"]]
    try:
        if command["words"][:1] == ["-m"]:
            sys.argv = command["words"][1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        from keel.cli import main

        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        status = 1
    # What a user can see of an interpreter's end: threads are waited for, exit functions called, streams flushed.
    # Taking torch apart after that costs more than most commands.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


class Keel:
    """The `keel` of a checkout, called many times. Everything it sees lies below `folder`, whose name has one length.

    The checkout is reached by a link there, so that no line is wrapped elsewhere because another path is longer.
    """

    def __init__(self, python: str, checkout: Path, folder: Path, jobs: int = 1, warm: bool = True) -> None:
        self.folder = folder
        (folder / "checkout").symlink_to(checkout)
        (folder / "tmp").mkdir()
        own = {"PYTHONPATH": str(folder / "checkout" / "src"), "TMPDIR": str(folder / "tmp")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KEEL_", "WANDB_", "PYTHON"))}
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).resolve()), "serve", "--jobs", str(jobs), *(["--warm"] if warm else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, **ENVIRONMENT, **own},
        )
        origin = self._answer()["keel"]
        if not str(origin).startswith(str(folder / "checkout")):
            self.close()
            raise SystemExit(f"compare: {checkout} has no src/keel: {python} finds {origin}")

    def run(self, batch: Sequence[Sequence[Mapping[str, Any]]], tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Sequences of {folder, words}, several sequences at a time; the answers in order of the batch."""
        commands: list[list[dict[str, Any]]] = []
        number = 0
        for sequence in batch:
            commands.append([])
            for command in sequence:
                out = self.folder / "tmp" / f"out-{number}"
                files = {"stdout": f"{out}.stdout", "stderr": f"{out}.stderr"}
                commands[-1].append({"limit": LIMIT_S, **command, **files, "id": number})
                number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(commands) + "\n")
        self._process.stdin.flush()
        answers: dict[int, dict[str, Any]] = {}
        for _ in range(number):
            answer = self._answer()
            answers[answer["id"]] = answer
            for stream in ("stdout", "stderr"):
                path = Path(answer[stream])
                answer[stream] = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
                path.unlink(missing_ok=True)
            tick()
        return [answers[index] for index in range(number)]

    def close(self) -> None:
        """End the process; a command that still runs is a child of it and ends by its own limit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"compare: the process that runs commands ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def keel_of(python: str, checkout: Path, jobs: int, warm: bool = True) -> Iterator[Keel]:
    """The checkout's `keel` with a temporary folder; both are gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="keel-golden-")).resolve()
    try:
        keel = Keel(python, checkout.resolve(), folder, jobs, warm)
        try:
            yield keel
        finally:
            keel.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- a record ---------------------------------------------------------------------------------------------------------


def read_items(path: Path = ITEMS) -> dict[str, Any]:
    """What to record, as `golden.yaml` lists it."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree


def slug(text: str, taken: set[str]) -> str:
    """A file name that tells a command line, and no other's."""
    short = re.sub(r"[^\w.=-]+", "_", text).strip("_.")[:70]
    name, number = short, 2
    while name in taken:
        name, number = f"{short}-{number}", number + 1
    taken.add(name)
    return name


def commands_in(page: str) -> list[str]:
    """The commands that a help page lists."""
    names, inside = [], False
    for line in page.splitlines():
        if line.startswith("╭"):
            inside = "Commands" in line
        elif inside and (match := re.match(r"│ ([a-z][\w-]*)(\s|$)", line)):
            names.append(match.group(1))
    return names


def help_items(keel: Keel, folder: Path, tick: Callable[[], None]) -> list[Item]:
    """One for `keel` and one for every command and command of a command, as their pages list them."""
    found: list[Item] = []
    level = [""]
    while level:
        found += [Item(f"help/{'-'.join(['keel', *path.split()])}", [f"{path} --help"], times=False) for path in level]
        asked = [[{"folder": str(folder), "words": [*path.split(), "--help"]}] for path in level]
        pages = keel.run(asked, tick)
        inner = [(path, name) for path, page in zip(level, pages, strict=True) for name in commands_in(page["stdout"])]
        level = [f"{path} {name}".strip() for path, name in inner]
    return found


def config_items(checkout: Path) -> list[Item]:
    """`--print-config` of every configuration, `--list` of every study."""
    items = []
    for path in sorted((checkout / "configs").rglob("*.y*ml")):
        name = path.relative_to(checkout).as_posix()
        words = f"ablate {name} --list" if "studies" in path.parts else f"train {name} --print-config"
        items.append(Item(f"config/{name.removeprefix('configs/').replace('/', '-')}", [words], times=False))
    return items


def listed_items(tree: Mapping[str, Any]) -> list[Item]:
    """Runs, commands and bad inputs, the longest first."""
    items = [Item(f"run-{name}", lines, run=f"runs/{name}") for name, lines in tree.get("runs", {}).items()]
    items += [Item(f"command/{name}", lines) for name, lines in tree.get("commands", {}).items()]
    for kind, lines in tree.get("bad", {}).items():
        taken: set[str] = set()
        items += [Item(f"bad/{kind}/{slug(line, taken)}", [line], times=False) for line in lines.splitlines()]
    return items


def prepare(folder: Path, checkout: Path, files: Mapping[str, str]) -> None:
    """The folder that an item's commands run in."""
    folder.mkdir(parents=True)
    (folder / "configs").symlink_to(checkout / "configs")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def printed(item: Item, answers: Sequence[Mapping[str, Any]], masks: Masks) -> str:
    """What the commands of an item printed, and how they ended."""
    blocks = []
    for line, answer in zip(item.commands, answers, strict=True):
        streams = [f"[{name}]\n{masks.stream(answer[name])}" for name in ("stdout", "stderr") if answer[name].strip()]
        streams = [stream if stream.endswith("\n") else f"{stream}\n" for stream in streams]
        blocks.append(f"$ keel {line}\nstatus {answer['status']}\n{''.join(streams)}")
    return "\n".join(blocks)


def run_files(run: Path, masks: Masks) -> dict[str, str]:
    """A run's files as texts by name, and `files.txt`: every file with the digest of what it holds."""
    texts: dict[str, str] = {}
    listed = []
    config = run / "config.yaml"
    # The name of a warm start's folder is a digest of its settings, which tells nothing where a path is one of them.
    moved = config.is_file() and WARMSTART_PATH.search(masks.text(config.read_text(encoding="utf-8"))) is not None
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        text = file_text(path, masks)
        digest = "" if text is None else hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()
        shown = re.sub(r"^warmstart/\w+", f"warmstart/{MASK}", name) if moved else name
        listed.append(f"{masks.text(shown)} {digest}".rstrip())
        if isinstance(text, str) and (path.parent == run or name.endswith("trainer/state.json")):
            texts[f"{name}.txt"] = text
    texts["files.txt"] = "\n".join(listed) + "\n"
    return texts


def file_text(path: Path, masks: Masks) -> str | bytes | None:
    """What a file holds without what changes: text where it is text, bytes of weights, None where all of it changes."""
    if path.name == "rng.pt" or path.name.startswith((".lock", "events.out.")):
        return None
    if path.suffix in (".pt", ".safetensors", ".bin", ".png"):
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.name == "env.json":
        return json_lines(keys_only(json.loads(text)))
    if path.name == "report.html":
        return page_text(text, masks)
    if path.suffix == ".json":
        return json_lines(masks.data(json.loads(text)))
    if path.suffix == ".jsonl":
        return json_lines([masks.data(json.loads(line)) for line in text.splitlines()])
    return masks.text(text)


def write_item(out: Path, item: Item, answers: Sequence[Mapping[str, Any]], folder: Path, masks: Masks) -> None:
    """One file for an item that prints, a folder of files for one that leaves a run."""
    texts = {f"{item.name}.txt": printed(item, answers, masks)}
    if item.run is not None:
        texts = {f"{item.name}/printed.txt": printed(item, answers, masks)}
        texts |= {f"{item.name}/{name}": text for name, text in run_files(folder / item.run, masks).items()}
    for name, text in texts.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def record(
    checkout: Path,
    out: Path,
    *,
    only: str = "*",
    python: str = sys.executable,
    jobs: int = 2,
    items: Mapping[str, Any] | None = None,
    warm: bool = True,
) -> None:
    """Write the record of a checkout into a new folder; `only` are the items whose names match.

    `warm`: commands start from imported modules, which pays from a dozen commands on.
    """
    checkout, tree = checkout.resolve(), items or read_items()
    if out.exists() and not (out / ABOUT).exists() and any(out.iterdir()):
        raise SystemExit(f"compare: {out} holds something else than a record: give a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    with keel_of(python, checkout, jobs, warm) as keel, progress() as watch:
        place = keel.folder
        paths = {str(place): "<tmp>", str(checkout): "<checkout>", str(out.resolve()): "<out>", sys.prefix: "<python>"}
        helps = help_items(keel, place, watch("help pages", 0)) if only.startswith(("help", "*", "[")) else []
        chosen = [*listed_items(tree), *helps, *config_items(checkout)]
        chosen = [item for item in chosen if fnmatch.fnmatch(item.name, only)]
        batch = []
        for number, item in enumerate(chosen):
            folder = place / "items" / f"{number:04d}"
            prepare(folder, place / "checkout", tree.get("files", {}))
            batch.append([{"folder": str(folder), "words": shlex.split(line)} for line in item.commands])
        answers = keel.run(batch, watch(f"commands of {checkout.name}", sum(map(len, batch))))
        spent: dict[str, float] = {}
        for number, item in enumerate(chosen):
            mine, answers = answers[: len(item.commands)], answers[len(item.commands) :]
            folder = place / "items" / f"{number:04d}"
            write_item(out, item, mine, folder, Masks({str(folder): "<here>", **paths}, times=item.times))
            spent[item.name] = round(sum(answer["seconds"] for answer in mine), 2)
    (out / ABOUT).write_text(json.dumps(about(checkout, python, time.monotonic() - began, spent), indent=1) + "\n")


def about(checkout: Path, python: str, seconds: float, spent: Mapping[str, float]) -> dict[str, Any]:
    """Of what the record is, and how long its items took."""
    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    slowest = dict(sorted(spent.items(), key=lambda pair: -pair[1])[:20])
    made = {"commit": commit.stdout.strip(), "python": python, "platform": sys.platform}
    return {**made, "items": len(spent), "seconds": round(seconds, 1), "slowest": slowest}


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """A bar on stderr: `watch(label, total)` returns what is called after each command."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def watch(label: str, total: int) -> Callable[[], None]:
            number = bar.add_task(label, total=total or None)
            return lambda: bar.advance(number)

        yield watch


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Meant:
    """A difference that is meant: lines of a diff that match `line`, sign included, in items whose name matches."""

    item: str
    line: str
    why: str
    used: int = 0

    def covers(self, item: str, line: str) -> bool:
        """Whether this line of an item's diff is meant; it is counted."""
        hit = fnmatch.fnmatch(item, self.item) and re.search(self.line, line) is not None
        self.used += hit
        return hit


def read_meant(path: Path) -> list[Meant]:
    """A YAML list of {item, line, why}; an entry without a reason, or with a pattern that is none, is refused."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    meant = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or set(entry) != {"item", "line", "why"} or not all(entry.values()):
            raise SystemExit(f"compare: entry {number} of {path}: write {{item: NAME, line: REGEX, why: REASON}}")
        try:
            re.compile(entry["line"])
        except re.error as error:
            raise SystemExit(f"compare: entry {number} of {path}: {entry['line']!r} is no pattern: {error}") from None
        meant.append(Meant(**entry))
    return meant


def items_of(folder: Path) -> dict[str, Path]:
    """The files of a record by the name of their item."""
    if not (folder / ABOUT).is_file():
        raise SystemExit(f"compare: {folder} is no record: make one with record CHECKOUT {folder}")
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*.txt"))
        if path.name != ABOUT and path.is_file()
    }


def differences(before: Path, after: Path, meant: Sequence[Meant] = ()) -> dict[str, list[str]]:
    """Lines of each item's unified diff, without those that are meant; an item that only one has differs as a whole."""
    old, new = items_of(before), items_of(after)
    found: dict[str, list[str]] = {}
    for name in sorted({*old, *new}):
        one, other = _lines(old.get(name)), _lines(new.get(name))
        if one == other:
            continue
        diff = list(difflib.unified_diff(one, other, lineterm="", n=1))[2:]
        changed = [line for line in diff if line[:1] in "+-"]
        left = {line for line in changed if not sum(entry.covers(name, line) for entry in meant)}  # sum: all count it
        if left:
            found[name] = [line for line in diff if line[:1] not in "+-" or line in left]
    return found


def _lines(path: Path | None) -> list[str]:
    return ["(not recorded)"] if path is None else path.read_text(encoding="utf-8").split("\n")


def compare(before: Path, after: Path, meant_file: Path | None = None, most: int = 40) -> int:
    """Print what differs, item by item, and the list of what is meant; 1 if anything else differs."""
    meant = [] if meant_file is None else read_meant(meant_file)
    found = differences(before, after, meant)
    for name, lines in found.items():
        print(f"=== {name}")
        print("\n".join(lines[:most]))
        if len(lines) > most:
            print(f"… and {len(lines) - most} lines more: --lines {len(lines)}")
        print()
    for entry in meant:
        told = f"{entry.used} lines" if entry.used else "UNUSED: take it off the list"
        print(f"meant: {entry.item}: /{entry.line}/: {entry.why} ({told})")
    total = len({*items_of(before), *items_of(after)})
    same = f"all {total} items are identical" + (
        ", but for what is meant" if any(entry.used for entry in meant) else ""
    )
    print(f"{len(found)} of {total} items differ: {', '.join(found)}" if found else same)
    return int(bool(found))


def both(options: argparse.Namespace) -> int:
    """Record two checkouts and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        for checkout, name in ((options.old, "before"), (options.new, "after")):
            given = {"only": options.only, "python": options.python, "jobs": options.jobs}
            record(checkout, out / name, **given)
        return compare(out / "before", out / "after", options.meant, options.lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    recording = argparse.ArgumentParser(add_help=False)
    recording.add_argument("--python", default=sys.executable, help="interpreter with Keel's dependencies; this one's")
    recording.add_argument("--jobs", type=int, default=2, help="commands at a time, each of one thread (2)")
    recording.add_argument("--only", default="*", metavar="GLOB", help="only these items, such as 'bad/*'")
    comparing = argparse.ArgumentParser(add_help=False)
    comparing.add_argument("--meant", type=Path, metavar="FILE", help="YAML list of {item, line, why} that may differ")
    comparing.add_argument("--lines", type=int, default=40, help="most lines shown of an item's diff (40)")

    one = commands.add_parser("record", parents=[recording], help="record a checkout into a folder")
    one.add_argument("checkout", type=Path)
    one.add_argument("out", type=Path, metavar="OUT_DIR")
    one = commands.add_parser("compare", parents=[comparing], help="diff two records; exit status 1 if they differ")
    one.add_argument("before", type=Path, metavar="A_DIR")
    one.add_argument("after", type=Path, metavar="B_DIR")
    one = commands.add_parser("both", parents=[recording, comparing], help="record two checkouts and compare")
    one.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    one.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    one.add_argument("--out", type=Path, metavar="DIR", help="keep the records in DIR/before and DIR/after")
    one = commands.add_parser("serve")  # what record starts: not for people
    one.add_argument("--jobs", type=int, default=1)
    one.add_argument("--warm", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 where records differ."""
    options = arguments(argv)
    if options.command == "serve":
        serve(options.jobs, options.warm)
    elif options.command == "record":
        given = {"only": options.only, "python": options.python, "jobs": options.jobs}
        record(options.checkout, options.out, **given)
    elif options.command == "compare":
        return compare(options.before, options.after, options.meant, options.lines)
    else:
        return both(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
