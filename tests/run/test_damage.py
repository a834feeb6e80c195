"""Damage: a file of a checkpoint that is not what was saved is found, named, and never trained on."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import keel
from keel.base.errors import KeelError
from keel.cli import main
from keel.run.model_ref import checkpoint_of
from keel.trainer import integrity
from keel.trainer.integrity import find_damage
from run.test_resume import lines
from trainer.small import BASE

OPTIONS = ("run.max_steps=6", "checkpoint.every=2", "eval.every=3", "kl.beta=0.05")
FILES = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer/optimizer.pt",
    "trainer/reference.pt",
    "trainer/rng.pt",
    "trainer/state.json",
)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], None]] = {"flip": flip, "zero": zero, "truncate": truncate, "delete": os.unlink}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return keel.train(BASE, overrides=[*OPTIONS, f"run.dir={folder}"]).directory


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run; the reference stays one file for all checkpoints, as it was."""
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    links = [path / "trainer" / "reference.pt" for path in sorted((folder / "checkpoints").glob("step-*"))]
    for path in links[1:]:
        path.unlink()
        os.link(links[0], path)
    return folder


def resume(run: Path, *more: str) -> Any:
    return keel.train(BASE, overrides=[*OPTIONS, f"run.dir={run.parent}", *more], resume=True)


def damage_messages(run: Path) -> list[str]:
    return [event["message"] for event in lines(run, "events.jsonl") if event["kind"] == "checkpoint/damaged"]


def test_the_files_are_all_of_them(whole: Path) -> None:
    folder = whole / "checkpoints" / "step-6"
    assert tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())) == FILES
    assert find_damage(folder) == []


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_names_its_file(run: Path, file: str, kind: str) -> None:
    folder = run / "checkpoints" / "step-6"
    DAMAGE[kind](folder / file)
    assert [damage.file for damage in find_damage(folder)] == [file]


def test_no_byte_of_the_record_can_change(run: Path) -> None:
    """Its own checksum is in it: whichever byte changes, the record is not taken for another version's."""
    folder = run / "checkpoints" / "step-6"
    path = folder / "trainer" / "state.json"
    data = path.read_bytes()
    for position in range(0, len(data), 3):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        path.write_bytes(changed)
        damaged = [damage.file for damage in find_damage(folder)]
        assert damaged == ["trainer/state.json"] or json.loads(changed) == json.loads(data), position


@pytest.mark.slow
@pytest.mark.parametrize("file", ["README.md", "model.safetensors", *(file for file in FILES if "/" in file)])
def test_a_flipped_byte_is_resumed_past_exactly(whole: Path, run: Path, file: str) -> None:
    """From the checkpoint before it, or, for a reference that is every checkpoint's, with the one it was made from."""
    flip(run / "checkpoints" / "step-6" / file)
    result = resume(run)
    for name in ("metrics.jsonl", "eval.jsonl", "rollouts.jsonl"):
        assert lines(run, name) == lines(whole, name), name
    (message,) = damage_messages(run)
    assert message.startswith(f"the checkpoint step-6 is damaged: {file} ")
    if file == "trainer/reference.pt":
        assert message.endswith("it was rebuilt from the run's initial weights")
        assert all(find_damage(path) == [] for path in (run / "checkpoints").glob("step-*"))
    else:
        assert (run / "checkpoints" / "damaged-step-6").is_dir()
        assert "resumes from step-4" in message
    assert find_damage(run / "checkpoints" / "step-6") == []
    assert result.summary["kl"] == json.loads((whole / "summary.json").read_text())["kl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kind"),
    [("model.safetensors", "zero"), ("trainer/optimizer.pt", "truncate"), ("trainer/state.json", "delete")],
)
def test_other_damage_is_resumed_past_too(whole: Path, run: Path, file: str, kind: str) -> None:
    DAMAGE[kind](run / "checkpoints" / "step-6" / file)
    DAMAGE[kind](run / "checkpoints" / "step-4" / file)
    resume(run)
    assert lines(run, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert [message.split(";")[0].split()[2] for message in damage_messages(run)] == ["step-6", "step-4"]


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"files": null}', '{"files": {}, "state": 3}', "{", ""])
def test_a_record_of_any_content_is_one_line(run: Path, content: str) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "trainer" / "state.json").write_text(content)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(KeelError, match=r"none of the checkpoints .* is intact: step-6/trainer/state\.json") as caught:
        resume(run)
    assert "\n" not in str(caught.value)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_without_a_whole_checkpoint_ends_with_status_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        flip(folder / "model.safetensors")
    assert main(["train", "--resume", str(run)]) == 2
    assert "step-6/model.safetensors has changed since it was saved" in capsys.readouterr().err


def test_a_record_without_checksums_is_damaged(run: Path) -> None:
    path = run / "checkpoints" / "step-6" / "trainer" / "state.json"
    record = json.loads(path.read_text())
    del record["checksums"], record["sha256"]
    path.write_text(json.dumps(record))
    assert [damage.file for damage in find_damage(path.parents[1])] == ["trainer/state.json"]


def test_a_damaged_reference_is_not_linked_into_the_next_checkpoint(run: Path) -> None:
    """Its new checksum would make the damage good."""

    def damage(state: Any, metrics: Any) -> None:
        if state.step == 7:
            flip(run / "checkpoints" / "step-6" / "trainer" / "reference.pt")

    keel.train(
        BASE, overrides=["run.max_steps=8", *OPTIONS[1:], f"run.dir={run.parent}"], resume=True, callbacks=[damage]
    )
    assert find_damage(run / "checkpoints" / "step-8") == []
    assert [damage.file for damage in find_damage(run / "checkpoints" / "step-6")] == ["trainer/reference.pt"]
    saved = json.loads((run / "checkpoints" / "step-8" / "trainer" / "state.json").read_text())
    held = torch.load(run / "checkpoints" / "step-8" / "trainer" / "reference.pt", weights_only=True)
    assert held["fingerprint"] == saved["reference"]["fingerprint"]


@pytest.mark.parametrize(
    ("words", "kind"),
    list(zip([["eval", "RUN"], ["kl", "RUN"], ["export", "RUN", "OUT"], ["eval", "RUN@6"]], DAMAGE, strict=True)),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "trainer/state.json"])
def test_a_model_that_is_not_the_saved_one_is_not_read(
    run: Path, tmp_path: Path, words: list[str], file: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is an older one read in its place: the command ends with the file's name and the way to name another."""
    DAMAGE[kind](run / "checkpoints" / "step-6" / file)
    arguments = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in words]
    assert main(arguments) == 2
    stderr = capsys.readouterr().err
    assert f"step-6 is damaged: {file} " in stderr
    assert f"{run}@STEP" in stderr
    assert "3, 4" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_that_is_given_by_its_folder_needs_its_record(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / "step-6"
    DAMAGE[kind](folder / "trainer" / "state.json")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "step-6 is damaged: trainer/state.json " in capsys.readouterr().err


def test_the_best_is_known_without_the_optimizer_and_not_without_the_record(run: Path) -> None:
    newest = run / "checkpoints" / "step-6"
    best = json.loads((newest / "trainer" / "state.json").read_text())["state"]["best"]["step"]
    (newest / "trainer" / "optimizer.pt").unlink()
    assert checkpoint_of(run, "best").name == f"step-{best}"
    flip(newest / "trainer" / "state.json")
    with pytest.raises(KeelError, match=r"step-6 is damaged: trainer/state\.json"):
        checkpoint_of(run, "best")


def test_another_step_is_exported_by_the_words_of_the_refusal(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints" / "step-6" / "model.safetensors")
    assert main(["export", f"{run}@4", str(tmp_path / "out")]) == 0
    saved = run / "checkpoints" / "step-4" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("lost", ["nothing more", "checkpoints"])
@pytest.mark.parametrize("beta", [0.05, 5])
def test_a_run_without_its_configuration_is_not_resumed(run: Path, beta: float, lost: str) -> None:
    """Nothing could say whether it is the same run."""
    (run / "config.yaml").unlink()
    if lost == "checkpoints":
        shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(KeelError, match=r"config\.yaml is missing.*restore it") as caught:
        keel.train(BASE, overrides=[*OPTIONS[:3], f"kl.beta={beta}", f"run.dir={run.parent}"], resume=True)
    assert "\n" not in str(caught.value)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["pytorch_model.bin", "model.safetensors.index.json", "adapter_config.json", "chat.jinja", "trainer/extra.pt"],
)
def test_a_file_that_was_not_saved_is_damage(whole: Path, run: Path, file: str) -> None:
    folder = run / "checkpoints" / "step-6"
    (folder / file).write_text("{}")
    assert [str(damage) for damage in find_damage(folder)] == [f"{file} was not saved here"]
    assert len(find_damage(folder, model_only=True)) == (not file.startswith("trainer/"))
    resume(run)
    assert damage_messages(run)[0].startswith(f"the checkpoint step-6 is damaged: {file} was not saved here")
    assert lines(run, "metrics.jsonl") == lines(whole, "metrics.jsonl")


def test_notes_hidden_files_and_folders_of_ones_own_are_no_damage(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "step-6"
    (folder / "notes.md").write_text("the good one")
    (folder / ".reference.json.tmp").write_text("")
    assert main(["export", str(folder), str(folder / "exported")]) == 0
    assert find_damage(folder) == []


def test_a_file_that_cannot_be_read_now_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer for a moment must not cost a checkpoint."""
    true = integrity.checksum

    def failing(path: Path) -> str:
        if path.name == "model.safetensors" and path.parent.name == "step-6":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return true(path)

    before = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "checksum", failing)
        with pytest.raises(KeelError, match=r"step-6/model\.safetensors cannot be read now \(Input/output error\)"):
            resume(run)
    assert {path: path.read_bytes() for path in run.rglob("*.jsonl")} == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-3", "step-4", "step-6"]
    assert find_damage(run / "checkpoints" / "step-6") == []


def test_what_was_logged_between_is_kept(run: Path) -> None:
    """As after a rollback: the steps that the run takes again are in abandoned/ as they were."""
    names = ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl", "events.jsonl")
    before = {name: (run / name).read_bytes().splitlines() for name in names}
    flip(run / "checkpoints" / "step-6" / "model.safetensors")
    resume(run)
    for name in names:
        past = [line for line in before[name] if json.loads(line)["step"] > 4]
        abandoned = run / "abandoned" / "attempt-0" / name
        assert (abandoned.read_bytes().splitlines() if abandoned.exists() else []) == past, name
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines()] == [*range(1, 7)]
    assert any(
        event.get("message") == "the lines logged after step 4 were moved to abandoned/attempt-0"
        for event in lines(run, "events.jsonl")
    )


@pytest.mark.slow
def test_every_damaged_checkpoint_is_kept_under_its_own_name(run: Path) -> None:
    for _ in range(3):
        flip(run / "checkpoints" / "step-6" / "model.safetensors")
        resume(run)
    quarantined = ["damaged-step-6", "damaged-step-6-2", "damaged-step-6-3"]
    assert sorted(path.name for path in (run / "checkpoints").glob("damaged-*")) == quarantined
    assert damage_messages(run)[-1].endswith("is kept as checkpoints/damaged-step-6-3")
    assert sorted(path.name for path in (run / "abandoned").iterdir()) == ["attempt-0", "attempt-1", "attempt-2"]


def test_a_run_from_a_damaged_checkpoint_of_another_is_refused(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints" / "step-6" / "model.safetensors")
    start = f"model.name={run / 'checkpoints' / 'step-6'}"
    with pytest.raises(KeelError, match=r"step-6 is damaged: model\.safetensors"):
        keel.train(BASE, overrides=[*OPTIONS, f"run.dir={tmp_path / 'other'}", start])


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_optimizer_does_not_keep_a_model_from_being_exported(run: Path, tmp_path: Path, kind: str) -> None:
    DAMAGE[kind](run / "checkpoints" / "step-6" / "trainer" / "optimizer.pt")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    newest = run / "checkpoints" / "step-6" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == newest.read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(f for f in FILES if "/" not in f)


@pytest.mark.slow
def test_a_damaged_warm_start_is_made_again(tmp_path: Path) -> None:
    start = ["warmstart.steps=3", "warmstart.batch_size=4", "run.max_steps=2", f"run.dir={tmp_path}"]
    first = keel.train(BASE, overrides=start)
    (warmstart,) = (first.directory / "warmstart").iterdir()
    before = lines(first.directory, "metrics.jsonl")
    flip(warmstart / "model.safetensors")
    shutil.rmtree(first.directory / "checkpoints")
    for name in ("metrics.jsonl", "summary.json"):
        (first.directory / name).unlink()
    again = keel.train(BASE, overrides=start, resume=True)
    assert lines(again.directory, "metrics.jsonl") == before
    assert "warm start" in damage_messages(again.directory)[0]
    assert find_damage(warmstart) == []


def test_what_keel_sft_leaves_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from keel.api import supervise

    supervised = {**BASE, "run": {"name": "sft", "dir": str(tmp_path)}, "warmstart": {"steps": 2, "batch_size": 4}}
    supervise(supervised)
    folder = tmp_path / "sft" / "checkpoints" / "step-2"
    assert find_damage(folder) == []
    flip(folder / "model.safetensors")
    assert main(["export", str(tmp_path / "sft"), str(tmp_path / "out")]) == 2
    assert "model.safetensors has changed since it was saved" in capsys.readouterr().err


def test_unreadable_lines_are_said_and_a_broken_configuration_is_named(whole: Path, run: Path) -> None:
    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([metrics[0], b"\0" * 20 + b"\n", *metrics[2:]]))
    (run / "events.jsonl").write_bytes(b"{\n" + (run / "events.jsonl").read_bytes())
    resume(run)
    messages = [event["message"] for event in lines(run, "events.jsonl") if event["kind"] == "lines/damaged"]
    assert messages == [
        "line 2 of metrics.jsonl cannot be read and is dropped",
        "line 1 of events.jsonl cannot be read and is dropped",
    ]
    assert lines(run, "metrics.jsonl") == [line for line in lines(whole, "metrics.jsonl") if line["step"] != 2]
    zero(run / "config.yaml")
    with pytest.raises(KeelError, match=r"config\.yaml is damaged"):
        resume(run)


@pytest.mark.slow
def test_a_rollback_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Steps 7 to 11 are not finite; step 3 is the last good one, and when it is damaged the start is."""
    folder = tmp_path / "small" / "checkpoints"

    def damage(state: Any, metrics: Any) -> None:
        if state.step == 10 and state.attempt == 0:
            flip(folder / "step-3" / "model.safetensors")

    settings = ["task.name=trainer.faults:poisoned", "run.max_steps=14", "checkpoint.every=3", "checkpoint.best=false"]
    settings += ["eval.every=0", "checkpoint.keep=9", f"run.dir={tmp_path}"]
    result = keel.train(BASE, overrides=settings, callbacks=[damage])
    events = lines(result.directory, "events.jsonl")
    assert [event["to"] for event in events if event["kind"] == "rollback"] == [0]
    (message,) = damage_messages(result.directory)
    assert message.startswith("the checkpoint step-3 is damaged: model.safetensors ")
    assert [line["step"] for line in lines(result.directory, "metrics.jsonl")] == list(range(1, 15))
