"""Logs of other trainers in every format: metric names, exports, file loggers, console output, W&B folders."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from doctor.test_readers import board, keel_run
from keel.base.errors import KeelError
from keel.base.yaml_text import load_package_yaml
from keel.doctor.examine import examine
from keel.doctor.names import TRAINERS, canonical, keel_options, option_name, renamed, source_of
from keel.doctor.readers import read_history, runs_below

K3 = "kl/policy_ref/k3/mean"

# What a step of each trainer logs: (theirs, value, Keel's name, value there).
LOGGED: dict[str, list[tuple[str, float, str, float]]] = {
    "TRL": [
        ("train/kl", 0.01, K3, 0.01),
        ("train/completions/mean_length", 40, "length/mean", 40),
        ("train/rewards/exact/mean", 0.5, "reward/part/exact", 0.5),
        ("train/frac_reward_zero_std", 0.25, "reward/zero_variance_fraction", 0.25),
    ],
    "verl": [
        ("actor/kl_loss", 0.01, K3, 0.01),
        ("actor/kl_coef", 0.001, "kl/beta", 0.001),
        ("critic/score/mean", 0.5, "reward/mean", 0.5),
        ("actor/lr(1e-4)", 0.02, "optim/learning_rate", 2e-6),
        ("training/rollout_probs_diff_mean", 0.004, "sampler/probability_gap_mean", 0.004),
        ("val-core/gsm8k/acc/mean@1", 0.4, "eval/gsm8k/acc/mean@1", 0.4),
    ],
    "OpenRLHF": [
        ("train/kl", -0.001, "kl/policy_ref/k1/mean", -0.001),
        ("train/actor_grad_norm", 0.3, "grad/norm", 0.3),
        ("train/group_reward_std", 0.4, "reward/within_group_std", 0.4),
        ("train/rollout/truncated_rate", 0.1, "length/truncated_fraction", 0.1),
    ],
    "NeMo-RL": [
        ("train/kl_penalty", 0.01, K3, 0.01),
        ("train/token_mult_prob_error", 1.01, "sampler/multiplicative_error", 1.01),
        ("train/baseline_reward/pct_0", 20, "reward/solved_none_fraction", 0.2),
        ("train/baseline_reward/pct_1", 30, "reward/zero_variance_fraction", 0.5),
    ],
    "prime-rl": [
        ("mismatch_kl/all/mean", 0.002, "kl/sampler_policy/k3/mean", 0.002),
        ("optim/lr", 1e-6, "optim/learning_rate", 1e-6),
        ("train/agg/all/agent/reward/mean", 0.5, "reward/mean", 0.5),
        ("train/agg/all/agent/rewards/format/mean", 0.9, "reward/part/format", 0.9),
        ("train/agg/all/agent/solved_none", 0.25, "reward/solved_none_fraction", 0.25),
        ("train/agg/all/agent/solved_all", 0.25, "reward/zero_variance_fraction", 0.5),
    ],
}


@pytest.mark.parametrize("trainer", LOGGED)
@pytest.mark.parametrize("form", ["tensorboard", "csv", "jsonl"])
def test_a_log_is_recognised_by_its_names_whatever_its_form(tmp_path, trainer, form):
    rows = LOGGED[trainer]
    if form == "tensorboard":
        board(tmp_path, {theirs: [value] * 3 for theirs, value, _, _ in rows})
        path = tmp_path
    elif form == "csv":
        path = tmp_path / "log.csv"
        names, values = ",".join(r[0] for r in rows), ",".join(str(r[1]) for r in rows)
        path.write_text(f"step,{names}\n" + "".join(f"{step},{values}\n" for step in (1, 2, 3)))
    else:  # rows of a step may be split
        path = tmp_path / "log.jsonl"
        lines = [{"step": step, theirs: value} for step in (1, 2, 3) for theirs, value, _, _ in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_history(path)
    assert history.source == trainer
    for theirs, _, ours, value in rows:
        assert history.series[ours].steps == (1, 2, 3), theirs
        assert history.series[ours].values == pytest.approx([value] * 3), theirs


@pytest.mark.parametrize("name", TRAINERS)
def test_every_row_is_reached_and_tells_its_unit(name):
    trainer = TRAINERS[name]
    logged = [theirs.replace("*", "x") for theirs in trainer.metrics]
    assert source_of(logged) == name
    assert source_of([f"train/{theirs}" for theirs in logged]) == name
    for row, (theirs, entry) in enumerate(trainer.metrics.items()):
        hit = trainer.find(theirs.replace("*", "x"))
        assert hit is not None
        assert hit[0] == row, f"{theirs} is hidden by {hit[1].keel}"
        assert "*" not in hit[1].keel
        assert entry.unit
        assert entry.per
    assert option_name("rollout.temperature", name) in trainer.options


def test_keels_own_names_are_nobody_elses():
    own = ["reward/mean", "reward/std", "entropy/mean", "loss/total", "optim/learning_rate", "mismatch/ess"]
    assert source_of([*own, "mismatch/capped_fraction", "rollout/kept_mass/mean"]) is None
    assert [canonical(name) for name in own] == own
    assert source_of(["kl/policy_ref/k3/mean", "actor/lr", "critic/lr"]) is None
    series, unused = renamed({}, {})
    assert (series, unused) == ({}, [])


def test_every_metric_of_keel_is_recognised_in_a_table(tmp_path):
    tables = load_package_yaml("keel.base", "metrics.yaml").values()
    names = [re.sub(r"\{(\w+)[^}]*\}", r"\1", name).replace("*", "x") for table in tables for name in table]
    (tmp_path / "log.csv").write_text(f"step,{','.join(names)}\n" + f"1{',0.5' * len(names)}\n")
    assert set(names) <= set(read_history(tmp_path / "log.csv").series)


# ------------------------------------------------------------------------------------------------ W&B


def test_a_chart_exported_from_wandb(tmp_path):
    path = tmp_path / "chart.csv"
    path.write_text(
        '"Step","my - run - train/kl","my - run - train/kl__MIN","my - run - train/kl__MAX",'
        '"my - run - train/completions/mean_length"\n"1","0.0","0.0","0.0","30"\n"2","0.02","0.01","0.03",""\n'
    )
    history = read_history(path)
    assert history.series[K3].values == (0.0, 0.02)
    assert history.series["length/mean"].values == (30,)
    assert set(history.series) == {K3, "length/mean"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Step,a - kl,a - kl__MIN,b - kl,b - kl__MIN\n1,0,0,0,0\n", r"2 W&B runs \(a, b\)"),
        ("Name,State,kl\nx,finished,0.1\n", "one row per run"),
        (f"a,{'x' * 200_000}\n1,2\n", "not a CSV file"),
    ],
)
def test_an_export_that_is_no_history_is_one_line(tmp_path, text, says):
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(KeelError, match=says):
        read_history(tmp_path / "log.csv")


def test_a_history_of_wandb_leaves_out_what_was_not_logged(tmp_path):
    rows = [
        {"_step": 7, "step": 1, "optim/lr": 1e-6, "mismatch_kl/all/mean": None},
        {"_step": 8, "step": 1, "optim/lr": None, "mismatch_kl/all/mean": "NaN"},
        {"_step": 9, "step": 2, "optim/lr": 1e-6, "mismatch_kl/all/mean": 0.01},
    ]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = read_history(tmp_path / "history.jsonl")
    assert history.series["optim/learning_rate"].steps == (1, 2)  # the trainer's steps, not W&B's calls
    assert history.series["kl/sampler_policy/k3/mean"].bad_steps == (1,)


def wandb_file(path: Path, rows: list[dict[str, Any]]) -> None:
    """A W&B file: LevelDB records after seven bytes, split at block ends."""
    from wandb.proto import wandb_internal_pb2

    data, block = b":W&B\x2b\xa5\x00", 32768
    for row in rows:
        record: Any = wandb_internal_pb2.Record()
        for name, value in row.items():
            item = record.history.item.add()
            item.nested_key.append(name)
            item.value_json = json.dumps(value)
        record.history.step.num = row["step"]
        text, first = record.SerializeToString(), True
        while text or first:
            if block - len(data) % block < 7:
                data += bytes(block - len(data) % block)
            part, text = text[: (room := block - len(data) % block - 7)], text[room:]
            data += struct.pack(
                "<IHB", 0, len(part), {(True, True): 1, (True, False): 2}.get((first, not text), 3 + (not text))
            )
            data, first = data + part, False
    path.write_bytes(data)


def test_a_run_folder_of_wandb(tmp_path):
    run = tmp_path / "wandb" / "run-20260101-abc"
    (run / "files").mkdir(parents=True)
    (run / "files" / "config.yaml").write_text(
        "wandb_version: 1\nactor_rollout_ref:\n  value:\n    actor: {kl_loss_coef: 0.02, use_kl_loss: true}\n"
    )
    rows = [
        {"step": step, "actor/kl_loss": 0.01 * step, "critic/score/mean": 0.5, "x": "y" * 400} for step in range(200)
    ]
    wandb_file(run / "run-abc.wandb", rows)
    history = read_history(run)
    assert history.source == "verl"
    assert len(history.series[K3]) == 200  # over several blocks
    assert history.series[K3].values[-1] == pytest.approx(1.99)
    assert history.option("kl.beta") == 0.02
    assert runs_below(tmp_path) == [run]
    (run / "run-abc.wandb").unlink()
    (run / "files" / "wandb-summary.json").write_text("{}")
    with pytest.raises(KeelError, match="export it as CSV"):
        read_history(run)
    (run / "files" / "output.log").write_text("step:1 - actor/kl_loss:0.5 - actor/lr:1e-6\nTraining: 5%\n")
    assert read_history(run).series[K3].values == (0.5,)


def test_verls_coefficient_counts_where_it_is_used():
    args = {"actor_rollout_ref": {"actor": {"kl_loss_coef": 0.001, "use_kl_loss": False}}}
    assert keel_options("verl", args) == {"kl": {"beta": 0.0}}
    assert keel_options("somebody", args) == {}


# --------------------------------------------------------------------------------------- file loggers, consoles


def test_verls_file_logger_and_console_say_the_same(tmp_path):
    (tmp_path / "run.jsonl").write_text(
        "".join(json.dumps({"step": s, "data": {"actor/kl_loss": 0.01 * s, "actor/lr": 1e-6}}) + "\n" for s in (1, 2))
    )
    (tmp_path / "run.log").write_text(
        "Training Progress: 10%|#         | 1/10 [00:10<01:30, 10.00s/it]\n"
        "\x1b[36m(TaskRunner pid=4321)\x1b[0m step:1 - actor/kl_loss:np.float64(0.01) - actor/lr:1e-06\n"
        "(TaskRunner pid=4321) step:2 - actor/kl_loss:0.02 - actor/lr:1e-06 - critic/score/mean:nan\n"
    )
    by_file, by_console = read_history(tmp_path / "run.jsonl"), read_history(tmp_path / "run.log")
    for history in (by_file, by_console):
        assert history.source == "verl"
        assert history.series[K3].steps == (1, 2)
        assert history.series[K3].values == pytest.approx((0.01, 0.02))
    assert by_console.series["reward/mean"].bad_steps == (2,)


def test_printed_dictionaries_and_pairs(tmp_path):
    (tmp_path / "trl.log").write_text(
        "loading\n{'loss': '0.0', 'grad_norm': 1.5, 'kl': '3e-05', 'reward': 0.5}\n"
        '{"loss": 0.1, "grad_norm": 1.6, "kl": 4e-5, "reward": NaN}\n'
    )
    history = read_history(tmp_path / "trl.log")
    assert history.series[K3].values == (3e-5, 4e-5)
    assert history.series["reward/mean"].bad_steps == (2,)
    (tmp_path / "own.txt").write_text(
        "epoch 1\nstep=1 reward=.5 kl=0\nsaved to a/b-c:d\nstep=2, reward = 0.6, kl: 1e-3\n"
    )
    history = read_history(tmp_path / "own.txt")
    assert history.series["reward/mean"].values == (0.5, 0.6)
    assert history.series[K3].steps == (1, 2)


def test_a_json_file_that_is_one_list(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps({"history": [{"step": 1, "kl": 0.5}, {"step": 2, "kl": 0.6}]}))
    assert read_history(tmp_path / "log.json").series[K3].values == (0.5, 0.6)


def test_metrics_of_another_trainer_under_keels_file_name(tmp_path):
    rows = [{"step": 1, "optim/lr": 1e-6, "time": 0}, {"step": 1, "mismatch_kl/all/mean": 0.01}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_history(tmp_path).source == "prime-rl"
    assert read_history(keel_run(tmp_path / "keel")).source == "keel"


def test_a_step_that_was_logged_twice_counts_as_it_was_done_last(tmp_path):
    steps = [1, 2, 3, 2, 3, 4]  # resumed from step 1
    rows = [{"step": step, "kl": float(line)} for line, step in enumerate(steps)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_history(tmp_path / "log.jsonl").series[K3].values == (0.0, 3.0, 4.0, 5.0)


def test_evaluations_in_trls_state_are_read(tmp_path):
    lines = [
        {"step": 1, "reward": 0.1},
        {"step": 1, "eval_reward": 0.2, "eval_runtime": 8.0},
        {"step": 2, "reward": 0.3},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": lines}))
    history = read_history(tmp_path)
    assert history.series["eval/reward"].values == (0.2,)
    assert history.series["other/eval_runtime"].values == (8.0,)
    assert history.series["reward/mean"].values == (0.1, 0.3)


def test_a_state_nested_beyond_measure_is_one_line(tmp_path):
    (tmp_path / "trainer_state.json").write_text("[" * 100_000)
    with pytest.raises(KeelError, match="is not JSON"):
        read_history(tmp_path)


def test_runs_below_a_folder_are_listed_once(tmp_path):
    keel_run(tmp_path / "a" / "keel")
    (tmp_path / "b" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "b" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    board(tmp_path / "b" / "runs" / "x", {"train/kl": [0.0]})
    board(tmp_path / "c" / "d", {"train/kl": [0.0]})
    assert runs_below(tmp_path) == [tmp_path / "a" / "keel", tmp_path / "b", tmp_path / "c" / "d"]
    assert runs_below(tmp_path / "b") == [tmp_path / "b"]
    assert runs_below(tmp_path / "b" / "runs") == [tmp_path / "b" / "runs" / "x"]


def test_a_rate_that_three_decimals_round_to_0_is_no_rate_of_0(tmp_path):
    """verl's console used `{value:.3f}` for every metric for years."""
    rewards = [0.2 + 0.005 * step + 0.02 * (step % 3) for step in range(1, 61)]
    lines = [
        f"step:{step} - actor/lr:0.000 - actor/kl_loss:{0.0001 * step:.3f} - critic/score/mean:{reward:.3f} - "
        f"actor/grad_norm:{0.3 + 0.01 * (step % 5):.3f} - actor/entropy:{1.5 - 0.004 * step:.3f}"
        for step, reward in enumerate(rewards, start=1)
    ]
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines) + "\n")
    history = read_history(log)
    assert history.get("optim/learning_rate") is None
    assert not [finding for finding in examine(log).findings if finding.severity != "note"]
