"""The recorder on small checkouts made here: what may differ is masked, one digit that differs is shown."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_checkouts", ROOT / "scripts" / "compare_checkouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = script()

CLI = """
import json, sys, time
from pathlib import Path

def main():
    words = sys.argv[1:]
    if words == ["--help"]:
        print("╭─ Commands ──╮\\n│ train  Train a model. │\\n│        and so on │\\n╰──╯")
    elif words[-1] == "--help":
        print("usage of", words[0])
    elif words[-1] == "--print-config":
        print(Path(words[1]).read_text())
    elif words[:1] == ["train"]:
        run = Path("runs/short")
        run.mkdir(parents=True)
        line = {"step": 1, "loss/total": VALUE, "time/total_s": time.perf_counter(), "order": 1}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
        (run / "weights.safetensors").write_bytes(b"w")
        print(f"done in {time.perf_counter():.3f} s at {run.resolve()}")
    elif words == ["crash"]:
        raise ValueError("a bug")
    else:
        sys.stderr.write("keel: error: give 30 s\\n")
        return 2
    return 0
"""
ITEMS = {
    "files": {"note.txt": "hello"},
    "runs": {"short": ["train default"]},
    "bad": {"option": "nothing\ncrash\n"},
}


def checkout(folder: Path, value: str = "0.1", cli: str = CLI) -> Path:
    (folder / "src" / "keel").mkdir(parents=True)
    (folder / "configs").mkdir()
    (folder / "configs" / "a.yaml").write_text("kl: {beta: 0.1}\n")
    (folder / "src" / "keel" / "__init__.py").write_text("")
    (folder / "src" / "keel" / "cli.py").write_text(cli.replace("VALUE", value))
    return folder


def recorded(source: Path, out: Path, **options: Any) -> Path:
    tool.record(source, out, items=ITEMS, warm=False, **options)
    return out


def test_times_and_paths_are_masked_and_numbers_are_not() -> None:
    masks = tool.Masks({"/tmp/x": "<tmp>", "/tmp/x/1": "<here>"})
    assert masks.text("saved /tmp/x/1/a and /tmp/x/b") == "saved <here>/a and <tmp>/b"
    assert masks.text("done in 4.31 s, loss 1.112") == "done in … s, loss 1.112"
    assert masks.text("grad 0.454   tok/s 1,458  ETA 2h 5m") == "grad 0.454 tok/s … ETA …"
    assert masks.text("Keel 0.1.0 on 2026-01-02 10:20 UTC, +0:04") == "Keel … on …-date, +…"
    assert masks.text("k3 0.30000000000000004   wide") == "k3 0.30000000000000004   wide"
    assert masks.text("Loading:   0%|   | 0/3\rLoading: 100%|###| 3/3 [00:00]\nend") == "end"
    assert tool.Masks(times=False).text("give 30 s") == "give 30 s"


def test_data_is_masked_by_the_names_of_keys() -> None:
    record = {"time/total_s": 0.2, "speed/tokens_per_s": 3, "wall_s": 1, "timeout_s": 30.0, "kl": [0.1], "time": None}
    masked = {**record, "time/total_s": "…", "speed/tokens_per_s": "…", "wall_s": "…"}
    assert tool.Masks().data(record) == masked
    assert tool.json_lines({"b": {"y": 0.1, "x": [1]}, "a": 2}) == "a: 2\nb:\n  x: [1]\n  y: 0.1\n"
    assert tool.keys_only({"a": {"b": 1}, "c": [2]}) == {"a": {"b": "…"}, "c": "…"}


def test_the_same_checkout_twice_is_identical(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkout(tmp_path / "source")
    one, two = recorded(source, tmp_path / "one"), recorded(source, tmp_path / "two", jobs=1)
    names = list(tool.items_of(one))
    assert names == [
        "bad/option/crash.txt",
        "bad/option/nothing.txt",
        "config/a.yaml.txt",
        "help/keel-train.txt",
        "help/keel.txt",
        "run-short/files.txt",
        "run-short/metrics.jsonl.txt",
        "run-short/printed.txt",
    ]
    assert (one / "bad/option/nothing.txt").read_text() == (
        "$ keel nothing\nstatus 2\n[stderr]\nkeel: error: give 30 s\n"
    )
    crash = "Traceback (most recent call last):\n  …\nValueError: a bug\n"
    assert (one / "bad/option/crash.txt").read_text() == f"$ keel crash\nstatus 1\n[stderr]\n{crash}"
    assert (one / "run-short/printed.txt").read_text().endswith("done in … s at <here>/runs/short\n")
    assert "kl: {beta: 0.1}" in (one / "config/a.yaml.txt").read_text()
    assert tool.main(["compare", str(one), str(two)]) == 0
    assert capsys.readouterr().out == "all 8 items are identical\n"


def test_one_last_digit_and_a_lost_item_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = recorded(checkout(tmp_path / "old", "0.1"), tmp_path / "one")
    two = recorded(checkout(tmp_path / "a longer name", "0.10000000000000002"), tmp_path / "two")
    (two / "config/a.yaml.txt").unlink()
    found = tool.differences(one, two)
    assert list(found) == ["config/a.yaml.txt", "run-short/files.txt", "run-short/metrics.jsonl.txt"]
    changed = [line for line in found["run-short/metrics.jsonl.txt"] if line[0] in "+-"]
    assert changed == ["-loss/total: 0.1", "+loss/total: 0.10000000000000002"]
    assert "+(not recorded)" in found["config/a.yaml.txt"]
    assert tool.main(["compare", str(one), str(two)]) == 1
    assert "3 of 8 items differ" in capsys.readouterr().out


def test_what_is_meant_is_listed_and_what_is_unused_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("one", "a 1\nb 1\n"), ("two", "a 2\nb 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").write_text("{}")
        (tmp_path / name / "item.txt").write_text(text)
    meant = tmp_path / "meant.yaml"
    meant.write_text("- {item: item.txt, line: '^[+-]a', why: a counts from two}\n")
    words = ["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--meant", str(meant)]
    assert tool.main(words) == 1
    shown = capsys.readouterr().out
    assert "-b 1\n" in shown
    assert "-a 1\n" not in shown
    meant.write_text(meant.read_text() + "- {item: '*', line: b, why: so does b}\n- {item: x, line: b, why: old}\n")
    assert tool.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("a counts from two (2 lines)")
    assert shown[1].endswith("so does b (2 lines)")
    assert "UNUSED" in shown[2]
    assert shown[3] == "all 1 items are identical, but for what is meant"


def test_the_list_is_long_enough_and_every_line_is_a_command() -> None:
    tree = tool.read_items()
    items = tool.listed_items(tree)
    assert sum(item.name.startswith("bad/") for item in items) >= 60
    assert len({item.name for item in items}) == len(items)
    known = set(tool.commands_in(keel("--help").stdout)) | {"--version", "-m", "nosuchcommand"}
    assert {shlex.split(line)[0] for item in items for line in item.commands} <= known


def keel(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), **tool.ENVIRONMENT}
    return subprocess.run([sys.executable, "-m", "keel", *words], capture_output=True, text=True, env=environment)
