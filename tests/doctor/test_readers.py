"""Logs as written by their trainers: a real TRL run, real event files, Keel's run directory, tables."""

from __future__ import annotations

import json
import math
import pickle
import random
import zipfile
from pathlib import Path

import pytest

from doctor.schooled import fresh_model
from keel.base.errors import KeelError
from keel.doctor.checks import check_history
from keel.doctor.examine import examine
from keel.doctor.names import SHORT, TRAINERS, canonical
from keel.doctor.readers import parse_map, read_history
from keel.doctor.readers.trainers import read_training_args
from keel.loggers import JsonlLogger, MultiLogger, RunDirectory


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four GRPO steps of TRL with random weights and equal rewards."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl") / "out"
    start = folder.parent / "model"  # TRL loads its reference from where the policy came from
    for part in fresh_model():
        part.save_pretrained(start)
    args = GRPOConfig(
        output_dir=str(folder),
        beta=0.04,
        loss_type="dr_grpo",
        learning_rate=1e-3,
        max_steps=4,
        logging_steps=1,
        save_steps=4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        report_to="tensorboard",
        use_cpu=True,
        bf16=False,
        seed=0,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(start),
        reward_funcs=lambda completions, **fields: [0.0 for _ in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(16)]}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "runs"))
        trainer.train()
    return folder


def test_a_run_of_trl_is_read(trl_run):
    history = read_history(trl_run)
    assert history.source == "TRL"
    assert history.series["reward/mean"].steps == (1, 2, 3, 4)
    assert history.series["kl/policy_ref/k3/mean"].values[0] == pytest.approx(0, abs=1e-6)  # before any update
    for name in ("entropy/mean", "grad/norm", "optim/learning_rate", "length/mean", "ratio/clip_fraction"):
        assert len(history.series[name].finite) == 4, name
    assert history.option("kl.beta") == 0.04
    assert history.option("loss.loss_type") == "dr_grpo"
    assert history.option("rollout.max_completion_length") == 6
    assert history.option("rollout.num_generations") == 4
    from keel.models.tiny import tiny_tokenizer

    assert history.vocabulary == len(tiny_tokenizer())


def test_a_run_of_trl_is_diagnosed(trl_run):
    diagnosis = examine(trl_run)
    codes = [finding.code for finding in diagnosis.findings]
    assert codes[0] == "output/random-weights"
    assert "reward/constant" in codes
    assert "kl/unneeded" in codes  # β 0.04 with dr_grpo
    assert any(line.startswith("reward/cliff: ") for line in diagnosis.unchecked)  # TRL keeps no rollouts
    assert any("no rollouts" in note for note in diagnosis.notes)


def test_the_state_file_alone_and_trls_tensorboard_files_say_the_same(trl_run):
    state = read_history(trl_run / "checkpoint-4" / "trainer_state.json")
    board = read_history(next(trl_run.rglob("events.out.tfevents.*")).parent)
    assert board.source == "TRL"  # by its names
    for name in ("reward/mean", "kl/policy_ref/k3/mean", "entropy/mean"):
        assert board.series[name].steps == state.series[name].steps
        assert board.series[name].values == pytest.approx(state.series[name].values, abs=1e-6)
    assert check_history(board).unchecked


def test_every_scalar_of_trl_that_a_check_reads_has_a_name(trl_run):
    """The table contains TRL's own names: each name that this run can log is in its log."""
    state = json.loads((trl_run / "checkpoint-4" / "trainer_state.json").read_text())
    logged = set(state["log_history"][0])
    table = TRAINERS["TRL"]
    # vLLM; an entropy bonus; other losses; tools; older versions; evaluation
    elsewhere = ("sampling/", "policy_", "entropy_", "aux_", "cispo", "vespo", "tools/", "completion_", "eval")
    always = {n for n in table.metrics if "*" not in n and not n.startswith(elsewhere) and n != "clip_ratio"}
    assert always <= logged
    neutral = {"epoch", "step", "num_tokens", "step_time", *(n for n in logged if n.endswith("/std"))}
    assert not {name for name in logged - neutral if table.find(name) is None}


def test_training_args_are_read_without_running_anything(tmp_path, trl_run):
    options = read_training_args(trl_run / "checkpoint-4" / "training_args.bin")
    assert options["beta"] == 0.04
    assert options["max_steps"] == 4
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (flag,)

    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(Evil()))
    assert read_training_args(tmp_path / "training_args.bin") == {}
    assert not flag.exists()
    (tmp_path / "training_args.bin").write_bytes(b"no zip")
    assert read_training_args(tmp_path / "training_args.bin") == {}


def test_a_log_without_steps_is_one_line(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"eval_loss": 1, "step": 3}]}')
    with pytest.raises(KeelError, match="log_history"):
        read_history(tmp_path)


# ------------------------------------------------------------------------------------------------ TensorBoard


def board(folder: Path, tags: dict[str, list[float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for tag, values in tags.items():
            for step, value in enumerate(values, start=1):
                writer.add_scalar(tag, value, step)


def test_verls_tags(tmp_path):
    board(
        tmp_path,
        {
            "actor/kl_loss": [0.0, 0.01, 1e5],
            "critic/score/mean": [0.1, 0.2, 0.3],
            "perf/mfu": [1.0],
            "actor/lr": [1e-6] * 3,
        },
    )
    history = read_history(tmp_path)
    assert history.series["kl/policy_ref/k3/mean"].values == pytest.approx((0.0, 0.01, 1e5))
    assert history.series["reward/mean"].values == pytest.approx((0.1, 0.2, 0.3))
    assert any("perf/mfu" in note for note in history.notes)
    assert "kl/explosion" in [finding.code for finding in examine(tmp_path).findings]


def test_tags_of_ones_own_are_mapped(tmp_path):
    board(tmp_path, {"my/kl": [15.0, 14.0]})
    with pytest.raises(KeelError, match="my/kl"):
        read_history(tmp_path)
    with pytest.raises(KeelError, match=r"no tag 'your/kl'.*my/kl"):
        read_history(tmp_path, {"kl": "your/kl"})
    assert examine(tmp_path, {"kl": "my/kl"}).findings[0].code == "kl/at-start"


# ------------------------------------------------------------------------------------------------ Keel


def keel_run(path: Path, steps: int = 12, **event: object) -> Path:
    noise = random.Random(0)
    with RunDirectory.create(path) as run:
        run.write_text("config.yaml", "kl: {beta: 0.01}\ndoctor: {thresholds: {kl_over_budget: 0.5}}\n")
        log = MultiLogger(JsonlLogger(run))
        for step in range(1, steps + 1):
            log.step(step, {"reward/mean": noise.random(), "kl/policy_ref/k3/mean": 0.03 * step, "grad/norm": math.nan})
        log.event("guard/skipped", step=3, message="skipped")
    return path


def test_keels_run_with_its_own_thresholds_and_a_torn_line(tmp_path):
    path = keel_run(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    history = read_history(path)
    assert history.source == "keel"
    assert history.steps == 12
    assert history.series["grad/norm"].bad_steps == tuple(range(1, 13))
    assert any("incomplete" in note for note in history.missing)
    diagnosis = examine(path)
    assert [finding.code for finding in diagnosis.findings][:2] == ["kl/at-start", "optim/non-finite"]
    assert "raised from 0.2 to 0.5" in diagnosis.raised_thresholds[0]


def test_of_a_step_that_was_done_again_the_later_attempt_counts(tmp_path):
    path = keel_run(tmp_path / "run", steps=5)
    with (path / "metrics.jsonl").open("a") as file:
        for step in (3, 4, 5, 6):
            file.write(json.dumps({"step": step, "reward/mean": 1.0}) + "\n")
    aside = path / "abandoned" / "attempt-0"
    aside.mkdir(parents=True)
    (aside / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.1, "kl/policy_ref/k3/mean": 80.0}\n')
    history = read_history(path)
    assert history.series["reward/mean"].steps == (1, 2, 3, 4, 5, 6)
    assert history.series["reward/mean"].values[2:] == (1.0,) * 4
    assert any("attempt-0 was abandoned after step 7; KL had reached 80" in note for note in history.notes)


# ------------------------------------------------------------------------------------------------ tables


def test_a_csv_with_a_mapping(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("it,my_kl,score\n1,0.0,0.2\n2,0.01,\n3,nan,0.4\n")
    history = read_history(path, parse_map("step=it,kl=my_kl,reward=score"))
    assert history.series["kl/policy_ref/k3/mean"].steps == (1, 2, 3)
    assert history.series["kl/policy_ref/k3/mean"].bad_steps == (3,)
    assert history.series["reward/mean"].values == (0.2, 0.4)  # an empty cell was not measured


def test_a_jsonl_of_known_names_needs_no_mapping(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"global_step": s, "train/kl": s * 1e4, "loss": 1}) + "\n" for s in (1, 2)))
    assert examine(path).findings[0].code == "kl/at-start"


def test_columns_that_are_not_there_are_named_with_those_that_are(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(KeelError, match="no column 'c'; there are: a, b"):
        read_history(path, {"kl": "c"})
    with pytest.raises(KeelError, match=r"no column of .* --map .*a, b"):
        read_history(path)


@pytest.mark.parametrize("text", ["kl", "kl=", "temperature_of_the_room=x"])
def test_a_mapping_that_says_nothing_is_refused(text):
    with pytest.raises(KeelError, match="--map"):
        parse_map(text)


def test_names_round_trip():
    assert canonical("train/rewards/accuracy/mean") == "reward/part/accuracy"
    assert canonical("kl/policy_ref/k3/mean") == "kl/policy_ref/k3/mean"
    assert canonical("room/temperature") is None
    assert len(set(SHORT.values())) == len(SHORT)


@pytest.mark.parametrize("name", ["nothing", "empty", "notes.txt"])
def test_what_is_no_log_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(KeelError):
        read_history(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("events.jsonl", '{"a": ' * 480 + "1" + "}" * 480 + "\n"),
        ("findings.json", "[" * 480 + "]" * 480),
        ("findings.json", "[" * 100_000),
        ("config.yaml", "a: " + "[" * 200 + "]" * 200),
        ("config.yaml", "a: " + "[" * 900 + "]" * 900),
        ("config.yaml", "a: " + "[" * 50_000),  # libyaml crashes on it
    ],
)
def test_what_is_nested_too_deeply_is_not_read(tmp_path, name, text):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / name).write_text(text)
    history = read_history(tmp_path)
    assert (history.events, dict(history.config)) == ((), {})
    assert any(note.startswith(name) for note in history.missing)
