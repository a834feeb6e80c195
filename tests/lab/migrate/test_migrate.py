"""`keel migrate`: every option of a peer's file is accounted for, and the result is a configuration that Keel takes."""

import json

import pytest
import yaml

from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.config.peers import defaults
from keel.lab.migrate import migrate

TRL = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: openai/gsm8k
dataset_config: main
output_dir: out/qwen-grpo
learning_rate: 2.0e-6
beta: 0.04
loss_type: dr_grpo
epsilon: 0.2
epsilon_high: 0.28
num_iterations: 2
num_generations: 16
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_completion_length: 1024
max_prompt_length: 512
temperature: 0.9
top_p: 1.0
top_k: 0
scale_rewards: false
mask_truncated_completions: true
importance_sampling_level: token
sync_ref_model: true
ref_model_mixup_alpha: 0.6
ref_model_sync_steps: 64
lr_scheduler_type: cosine
warmup_steps: 20
max_grad_norm: 0.2
weight_decay: 0.01
bf16: true
gradient_checkpointing: true
max_steps: 500
save_steps: 100
seed: 7
report_to: none
logging_steps: 1
reward_weights: [1.0, 0.5]
use_vllm: true
vllm_gpu_memory_utilization: 0.3
num_train_epochs: 1
push_to_hub: false
"""

VERL = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, norm_adv_by_std_in_grpo: true}
data:
  train_files: train.parquet
  val_files: test.parquet
  train_batch_size: 256
  max_prompt_length: 1024
  max_response_length: 2048
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 32, lora_alpha: 64, enable_gradient_checkpointing: true}
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 8
    clip_ratio: 0.2
    entropy_coeff: 0
    optim: {lr: 1.0e-6}
  rollout: {name: vllm, n: 5, temperature: 1.0, gpu_memory_utilization: 0.6, tensor_model_parallel_size: 2}
trainer:
  total_training_steps: 300
  experiment_name: qwen3-grpo
  n_gpus_per_node: 8
  logger: [console]
  save_freq: 20
"""


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    return path


@pytest.mark.parametrize(("name", "content"), [("trl.yaml", TRL), ("verl.yaml", VERL)])
def test_every_option_is_mapped_or_listed_with_a_reason(tmp_path, name, content):
    result = migrate(written(tmp_path, name, content))
    asked = {row.name for row in result.rows if not row.silent}
    data = yaml.safe_load(content)
    assert asked == set(flat(data))
    assert len(asked) >= 30 or name == "verl.yaml"
    for row in result.unmapped:
        assert len(row.reason) > 10, row
    assert result.refused is None
    config = load_config(yaml.safe_load(result.yaml()))
    assert config.to_dict() == load_config(dict(result.tree)).to_dict()


def flat(data, prefix=""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_trl_by_hand(tmp_path):
    """The values that a reader of both documentations would write down."""
    config = load_config(dict(migrate(written(tmp_path, "trl.yaml", TRL)).tree))
    assert config.rollout.prompts_per_step == 8 * 4 // 16
    assert (config.kl.beta, config.kl.estimator, config.kl.gradient, config.kl.reduction) == (
        0.04,
        "k3",
        "rho",  # use_bias_correction_kl, which is TRL 1.16's default
        "loss",
    )
    assert (config.loss.loss_type, config.loss.scale_rewards, config.loss.num_iterations) == ("dr_grpo", "none", 2)
    assert (config.reference.kind, config.reference.params) == ("ema", {"alpha": 0.6, "every": 32})
    # num_iterations=2: TRL's steps are updates, two of which are one of Keel's
    assert (config.run.dir, config.run.name, config.run.max_steps, config.run.seed) == ("out", "qwen-grpo", 250, 7)
    assert (config.optim.warmup_steps, config.checkpoint.every) == (10, 50)
    assert (config.data.max_prompt_length, config.data.truncation) == (512, "left")
    assert config.data.path == "openai/gsm8k,main"
    assert config.optim.schedule == "cosine"
    assert (config.rollout.engine, config.rollout.vllm.gpu_memory_utilization) == ("vllm", 0.3)


def test_verl_by_hand(tmp_path):
    config = load_config(dict(migrate(written(tmp_path, "verl.yaml", VERL)).tree))
    assert (config.kl.beta, config.kl.estimator, config.kl.placement) == (0.001, "k3", "loss")
    assert config.optim.minibatches == 4
    assert (config.model.lora.r, config.model.lora.alpha) == (32, 64)
    assert (config.data.path, config.data.truncation, config.data.max_prompt_length) == ("train.parquet", "drop", 1024)
    assert config.loss.loss_type == "dapo"  # verl's own default, token-mean
    assert config.rollout.num_generations == 5


def test_what_the_peer_does_in_silence_is_said(tmp_path):
    """TRL without a loss_type is dapo with completions of 512 tokens and the seed 42."""
    result = migrate(written(tmp_path, "trl.json", json.dumps({"learning_rate": 1e-6, "beta": 0.0})))
    silent = {row.name: row.options for row in result.rows if row.silent}
    assert silent["loss_type"] == {"loss.loss_type": "dapo"}
    config = load_config(dict(result.tree))
    assert (config.loss.loss_type, config.rollout.max_completion_length, config.run.seed) == ("dapo", 512, 42)
    assert config.kl.gradient == "auto"  # no penalty, so nothing of TRL's to keep


def test_the_silent_defaults_are_the_installed_trls():
    from dataclasses import fields

    from trl import GRPOConfig

    origins = ("TRL", "TRL with beta", "TRL with a correction", "TRL with a server")
    ours = {name: value for origin in origins for name, value in defaults(origin).items()}
    theirs = {f.name: f.default for f in fields(GRPOConfig)}
    assert {name: str(getattr(theirs[name], "value", theirs[name])) for name in ours} == {
        name: str(value) for name, value in ours.items()
    }


@pytest.mark.slow
def test_the_silent_defaults_of_a_distillation_are_the_installed_trls():
    from dataclasses import fields

    from trl import DistillationConfig
    from trl.experimental.gkd import GKDConfig

    distilled, gkd = (defaults(f"TRL with {name}") for name in ("DistillationConfig", "GKDConfig"))
    for config, ours in ((DistillationConfig, distilled), (GKDConfig, {**distilled, **gkd})):
        theirs = {f.name: getattr(f.default, "value", f.default) for f in fields(config)}
        known = {name: value for name, value in ours.items() if name in theirs}
        assert {name: str(theirs[name]) for name in known} == {name: str(value) for name, value in known.items()}
        assert {"beta", "learning_rate"} < known.keys()


def test_a_python_file_is_read_and_not_run(tmp_path):
    script = """
import os
BETA = 0.02
os._exit(3)
config = GRPOConfig(beta=BETA, num_generations=4, per_device_train_batch_size=8, learning_rate=lr(), output_dir="o")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B", args=config, reward_funcs=[accuracy],
                      peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"))
"""
    result = migrate(written(tmp_path, "train.py", script))
    config = load_config(dict(result.tree))
    assert (config.kl.beta, config.model.name, config.model.lora.r) == (0.02, "Qwen/Qwen2.5-0.5B", 8)
    reasons = {row.name: row.reason for row in result.unmapped}
    assert "computed in Python" in reasons["learning_rate"]
    assert "rewards:" in reasons["reward_funcs"]


@pytest.mark.parametrize(("name", "content"), [("a.py", "GRPOConfig(beta=0.02)"), ("a.json", '{"beta": 0.02}')])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8-sig")
    assert load_config(dict(migrate(path).tree)).kl.beta == 0.02


def test_a_shell_script_of_overrides(tmp_path):
    script = """#!/bin/bash
set -x
export CUDA_VISIBLE_DEVICES=0,1
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet data.train_batch_size=64 \\
    actor_rollout_ref.actor.optim.lr=1e-6  # a comment \\
    actor_rollout_ref.rollout.n=8 $@
"""
    result = migrate(written(tmp_path, "run.sh", script))
    assert result.origin == "verl"
    config = load_config(dict(result.tree))
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (64, 8)
    assert config.optim.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "- 1\n- 2\n", "mapping"),
        ("a.yaml", "a: [", "not YAML at line"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.py", f"GRPOConfig(beta={'-' * 5000}1)", "nested"),
        ("a.py", "def f(:", "not Python: line 1"),
        ("a.py", "x = 1", "GRPOConfig"),
        ("a.yaml", "", "mapping"),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, said, capsys):
    path = written(tmp_path, name, content)
    assert main(["migrate", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    with pytest.raises(KeelError, match="no file"):
        migrate(tmp_path / "missing.yaml")


def test_the_command_writes_a_configuration_that_loads(tmp_path, capsys):
    path, out = written(tmp_path, "verl.yaml", VERL), tmp_path / "mine.yaml"
    assert main(["migrate", str(path), "--out", str(out)]) == 0
    shown = capsys.readouterr().err
    assert "no counterpart" in shown
    assert "options mapped" in shown
    assert load_config(out).kl.beta == 0.001
    assert main(["migrate", str(path), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["migrate", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["origin"] == "verl"
    assert {"name", "value", "options", "reason", "note", "silent"} == set(data["options"][0])


def test_a_result_that_keel_refuses_is_said(tmp_path, capsys):
    """k1 in the loss pulls nowhere: Keel says so instead of running it."""
    content = VERL.replace("low_var_kl", "kl")
    assert main(["migrate", str(written(tmp_path, "verl.yaml", content))]) == 1
    assert "rejects the result" in capsys.readouterr().err


OPENRLHF = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain some/model --advantage_estimator group_norm \\
   --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.3 --lr_scheduler constant \\
   --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256 --micro_train_batch_size 8 --zero_stage 3 \\
   --generate_max_len 512 --actor_learning_rate 5e-7 --prompt_data some/prompts --input_key messages --save_steps -1
"""


def test_openrlhf(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(OPENRLHF)
    result = migrate(path)
    assert (result.origin, result.refused) == ("OpenRLHF", None)
    assert {row.name for row in result.unmapped} == {"lr_warmup_ratio", "num_episodes"}
    assert result.tree["parallel"] == {"sharding": "full"}
    assert result.tree["kl"] == {
        **{"beta": 0.001, "placement": "loss", "reduction": "loss", "estimator": "k3", "gradient": "plain"}
    }
    assert result.tree["rollout"] == {"prompts_per_step": 128, "num_generations": 8, "max_completion_length": 512}
    assert result.tree["optim"] == {
        "betas": [0.9, 0.95],
        "learning_rate": 5e-7,
        "schedule": "constant",
        "minibatches": 4,
    }
    assert result.tree["loss"] == {
        **{"loss_type": "dapo", "baseline": "group_mean", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.3}
    }
    path.write_text(OPENRLHF.replace("--use_kl_loss --kl_estimator k3", ""))
    assert migrate(path).tree["kl"] == {"beta": 0.001, "placement": "reward", "estimator": "k1"}
    path.write_text(OPENRLHF.replace("--advantage_estimator group_norm", ""))
    assert "advantage_estimator=gae, OpenRLHF's default" in migrate(path).refused
