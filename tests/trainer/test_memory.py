"""Out of memory: one line with the phase and the option, and a run that goes on as if it had not happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import keel
from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.base.world import World
from keel.cli import main
from keel.models.head import causal_lm
from keel.models.load import load_model
from keel.models.pack import microbatches, pack
from keel.rollout.options import RolloutOptions
from keel.trainer.batch import split
from keel.trainer.memory import OutOfMemory, Remedy, StepMemory, fewer_rows, memory_guard, smaller_passes
from trainer import exhausted
from trainer.small import BASE
from trainer.test_step import make

OVERRIDES = [
    "rollout.engine=trainer.exhausted:ExhaustedEngine",
    "model.scorer=trainer.exhausted:scorer",
    "optim.microbatch_tokens=60",
    "eval.every=2",
    "checkpoint.every=2",
]
CAUSE, ALL_4 = "(CUDA out of memory. Tried to allocate 2.00 GiB)", "rollout.max_batch is null (4 here)"
# What runs out, after how many calls, the line, the newest checkpoint then, and the option that lets it go on.
CASES: list[tuple[str, int, str, int, str]] = [
    ("rollout", 3, f"the rollout of step 4 {CAUSE}: rollout.max_batch is null (12 here)", 3, "rollout.max_batch=6"),
    ("score", 12, f"the score of step 4 {CAUSE}: optim.microbatch_tokens is 60", 3, "optim.microbatch_tokens=30"),
    (
        "update",
        10,
        f"the update of step 4 {CAUSE}: optim.microbatch_tokens is 60 (32 here)",
        3,
        "optim.microbatch_tokens=16",
    ),
    ("sync", 3, f"the sync of step 4 {CAUSE}: model.lora is null", 2, ""),
    (
        "evaluation",
        2,
        f"the evaluation at step 2 {CAUSE}: rollout.max_batch is null (4 here)",
        2,
        "rollout.max_batch=2",
    ),
    (
        "evaluation",
        3,
        f"the evaluation at step 4 {CAUSE}: rollout.max_batch is null (4 here)",
        4,
        "rollout.max_batch=2",
    ),
]


@pytest.fixture(autouse=True)
def _nothing_is_exhausted() -> Iterator[None]:
    exhausted.at.clear()
    yield
    exhausted.at.clear()


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "speed/", "memory/"))} for r in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return keel.train(BASE, overrides=[*OVERRIDES, f"run.dir={folder}"]).directory


@pytest.mark.slow
@pytest.mark.parametrize(("part", "calls", "line", "saved", "override"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_run_that_ran_out_of_memory_goes_on_exactly(
    part: str, calls: int, line: str, saved: int, override: str, tmp_path: Path, whole: Path
) -> None:
    exhausted.at[part] = calls
    run, given = tmp_path / "small", [*OVERRIDES, f"run.dir={tmp_path}"]
    with pytest.raises(KeelError) as raised:
        keel.train(BASE, overrides=given)
    message = str(raised.value)
    assert message.startswith(f"out of memory in {line}")
    assert message.endswith(f"keel train --resume {run} {override}" if override else "another run.name")
    assert max(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")) == saved
    keel.train(BASE, overrides=given, resume=True)
    for name in ("metrics.jsonl", "eval.jsonl", "rollouts.jsonl"):
        assert lines(run, name) == lines(whole, name), name
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole))
    assert {**ours, "wall_s": 0} == {**theirs, "wall_s": 0}


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_goes_on_with_the_option_it_names(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(BASE))
    exhausted.at["update"] = 10
    assert main(["train", str(config), *OVERRIDES, f"run.dir={tmp_path}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("keel: error: out of memory in the update of step 4 ")
    command = last.partition("resume with: keel ")[2].split()
    assert command[-1] == "optim.microbatch_tokens=16"
    assert main(command) == 0
    for ours, theirs in zip(lines(tmp_path / "small", "metrics.jsonl"), lines(whole, "metrics.jsonl"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert "out-of-memory" in [event["kind"] for event in lines(tmp_path / "small", "events.jsonl")]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_supervised_start_that_runs_out_of_memory(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(BASE))
    exhausted.at["supervised"] = 2
    overrides = ["model.name=trainer.exhausted:exhausted_model", "warmstart.steps=3", "warmstart.batch_size=16"]
    assert main([command, str(config), f"run.dir={tmp_path}", "run.max_steps=1", *overrides]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"out of memory in step 3 of the SFT warm start {CAUSE}: optim.microbatch_tokens is 8192 (" in last


def test_an_evaluation_that_runs_out_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(BASE))
    exhausted.at["evaluation"] = 0
    assert main(["eval", str(config), OVERRIDES[0]]) == 2
    line = f"the evaluation of letters {CAUSE}: {ALL_4}, try rollout.max_batch=2"
    assert line in capsys.readouterr().err.splitlines()[-1]


def group(number: int, prompt: int, *lengths: int) -> Group:
    completions = tuple(Completion((1,) * n, (True,) * n, (0.0,) * n, (0.0,) * n, "", "length") for n in lengths)
    return Group(Problem(str(number), ""), (1,) * prompt, completions)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=4)), min_size=1),
    st.integers(1, 200),
    st.booleans(),
)
def test_even_passes_are_as_many_and_no_larger(shapes: list[Any], budget: int, shared: bool) -> None:
    groups = [group(number, prompt, *lengths) for number, (prompt, lengths) in enumerate(shapes)]
    plain, even = (split(groups, budget, shared_prefix=shared, even=even) for even in (False, True))

    def area(parts: list[list[Group]]) -> int:
        return max(pack(part, 0, shared_prefix=shared).input_ids.numel() for part in parts)

    def completions(parts: list[list[Group]]) -> list[tuple[str, Completion]]:
        return [(g.problem.key, completion) for part in parts for g in part for completion in g.completions]

    assert plain == microbatches(groups, budget, shared_prefix=shared)
    assert len(even) <= len(plain)
    assert area(even) <= area(plain)
    assert completions(even) == completions(plain)


def test_groups_of_one_size_are_dealt_out_evenly() -> None:
    groups = [group(number, 4, 5, 5) for number in range(10)]  # 12 tokens each
    assert [len(part) for part in split(groups, 50, shared_prefix=True, even=False)] == [4, 4, 2]
    assert [len(part) for part in split(groups, 60, shared_prefix=True, even=False)] == [5, 5]
    assert [len(part) for part in split(groups, 100, shared_prefix=True, even=True)] == [5, 5]


def test_what_else_is_out_of_memory_and_what_is_not() -> None:
    def guarded(error: Exception) -> type[BaseException]:
        with pytest.raises(type(error) if isinstance(error, KeelError) else Exception) as raised:  # noqa: SIM117
            with memory_guard("the update", lambda: Remedy("a.b", "2", "1")):
                raise error
        return raised.type

    blas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    host = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
    for error in (torch.OutOfMemoryError("x"), blas, host, MemoryError()):
        assert guarded(error) is OutOfMemory
    for error in (RuntimeError("shapes differ"), KeelError("out of memory, said a user's own part")):
        assert guarded(error) is type(error)


def test_each_remedy_gives_way_to_the_next() -> None:
    loaded = load_model("trainer.small:small_model", device="cpu", probe=False)
    assert smaller_passes(loaded, 8192, 300, 100) == ("optim.microbatch_tokens", "8192 (300 here)", "150")
    assert smaller_passes(loaded, 128, 128, 100) == ("model.gradient_checkpointing", "false", "true")
    recomputing = load_model("trainer.small:small_model", device="cpu", probe=False, gradient_checkpointing=True)
    assert smaller_passes(recomputing, 128, 128, 100) is None
    assert fewer_rows(RolloutOptions(max_batch=8), 64) == ("rollout.max_batch", "8", "4")
    assert fewer_rows(RolloutOptions(max_batch=1), 64) == ("rollout.max_completion_length", "64", "32")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_fewer_rows_than_one_process_samples_are_advised(processes: int) -> None:
    run, _ = make("rollout.prompts_per_step=4", "rollout.num_generations=4")
    sampled = 4 * -(-4 // processes)
    with pytest.raises(OutOfMemory, match=rf"{sampled} here.*rollout\.max_batch={sampled // 2}"):  # noqa: SIM117
        with StepMemory(replace(run, world=World(0, processes)), 0)("rollout"):
            raise torch.OutOfMemoryError("x")


def test_weights_that_are_small_already_are_not_advised_again() -> None:
    def advised(quantized: bool, *overrides: str) -> str:
        run, _ = make(*overrides)
        causal_lm(run.policy.model).is_quantized = quantized
        with pytest.raises(OutOfMemory) as raised, StepMemory(run, 0)("sync"):
            raise torch.OutOfMemoryError("x")
        return str(raised.value)

    assert "model.lora=" in advised(False)
    assert "model.quantization=4bit" in advised(False, "model.lora.r=4")
    assert "model.lora.r=2" in advised(True, "model.lora.r=4")
