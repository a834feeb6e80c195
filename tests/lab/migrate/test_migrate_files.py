"""`keel migrate` on files as people have them: a TRL script, verl's run script with variables, verl's YAML."""

import json

import pytest
import yaml

from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.config.load import read_config
from keel.config.peers import defaults
from keel.lab.migrate import migrate

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

TRL_SCRIPT = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL: str = "Qwen/Qwen2.5-1.5B-Instruct"
GROUP = 8
PROMPTS = 16
COMMON = dict(weight_decay=0.01, max_grad_norm=0.5)
scale = 1
scale = 2  # only a run knows which

def accuracy(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]

training_args = GRPOConfig(
    output_dir="outputs/qwen-math",
    run_name="qwen-math",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    adam_epsilon=1e-7,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    optim="paged_adamw_8bit",
    bf16=True,
    per_device_train_batch_size=GROUP * 2,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_generations=GROUP,
    num_iterations=2,
    max_prompt_length=256,
    max_completion_length=512 + 256,
    max_steps=1000,
    save_steps=100,
    save_strategy="steps",
    save_total_limit=None,
    eval_strategy="steps",
    eval_steps=50,
    logging_steps=1,
    report_to="none",
    temperature=0.9,
    top_p=1.0,
    top_k=0,
    epsilon=0.2,
    epsilon_high=0.28,
    delta=2.0,
    loss_type="dr_grpo",
    scale_rewards="none",
    mask_truncated_completions=True,
    importance_sampling_level="token",
    use_vllm=True,
    vllm_mode="colocate",
    log_completions=True,
    push_to_hub=False,
    gradient_checkpointing=True,
    seed=3407,
    num_train_epochs=scale,
    **{"beta": 0.04},
    **COMMON,
)
trainer = GRPOTrainer(
    model=MODEL,
    args=training_args,
    processing_class=tokenizer,
    reward_funcs=[accuracy],
    train_dataset=load_dataset("openai/gsm8k", "main", split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
)
"""

VERL_SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
export VLLM_USE_V1=1

project_name='DAPO'; exp_name="qwen-${SIZE:-7b}"
adv_estimator=grpo
use_kl_in_reward=False
kl_coef=0.0
use_kl_loss=True
kl_loss_coef=0.002      # small
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
train_prompt_bsz=512
n_resp_per_prompt=16
train_prompt_mini_bsz=$(( train_prompt_bsz / 4 ))
HOME_DATA=${HOME}/data
if [ "$1" = "quick" ]; then lr=1e-5; else lr=1e-6; fi

VLLM_ATTENTION_BACKEND=XFORMERS python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=${adv_estimator} \\
    algorithm.use_kl_in_reward=${use_kl_in_reward} \\
    algorithm.kl_ctrl.kl_coef=${kl_coef} \\
    data.train_files="${HOME_DATA}/train.parquet" \\
    data.val_files="['$HOME/a.parquet', 'b.parquet']" \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=$max_response_length \\
    data.train_batch_size=${train_prompt_bsz} \\
    data.filter_overlong_prompts=True data.truncation='left' \\
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \\
    actor_rollout_ref.rollout.response_length='${data.max_response_length}' \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.rollout.val_kwargs.n=4 \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \\
    actor_rollout_ref.actor.use_kl_loss=${use_kl_loss} \\
    actor_rollout_ref.actor.kl_loss_coef=${kl_loss_coef} \\
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \\
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \\
    actor_rollout_ref.actor.optim.lr=${lr} \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \\
    custom_reward_function.path=rewards/math.py custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name="${project_name}" trainer.experiment_name="${exp_name}" \\
    trainer.val_before_train=True trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l) \\
    trainer.total_training_steps=400 trainer.total_epochs=10 $@ 2>&1 | tee beta=3.log
"""

VERL_YAML = """
defaults: [ppo_trainer, _self_]
data:
  train_files: train.parquet
  max_response_length: 2048
  max_prompt_length: 1024
  train_batch_size: 512
algorithm: {adv_estimator: rloo, use_kl_in_reward: true}
actor_rollout_ref:
  model: {path: "${oc.env:MODEL,none}"}
  actor:
    use_kl_loss: ${algorithm.kl_loss}
    ppo_epochs: "${oc.select:algorithm.passes,2}"
    optim: {lr: 1e-6, lr_warmup_steps: "${.warm}", warm: 7}
  rollout:
    n: 4
    response_length: ${data.max_response_length}
trainer:
  project_name: maths
  experiment_name: first
  default_local_dir: ckpt/${trainer.project_name}/${trainer.experiment_name}
  total_training_steps: 100
  save_freq: ${trainer.test_freq}
"""


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def reasons(result):
    return {row.name: row.reason for row in result.unmapped}


# ------------------------------------------------------------------------------------------------------ TRL


def test_a_trl_script_of_forty_options(tmp_path):
    result = migrate(written(tmp_path, "train.py", TRL_SCRIPT))
    assert sum(not row.silent for row in result.rows) >= 48
    assert result.refused is None
    assert set(reasons(result)) == {
        "processing_class",
        "reward_funcs",
        "train_dataset",
        "num_train_epochs",
    }
    tree = result.tree
    assert tree["rollout"]["prompts_per_step"] == 16 * 8 // 8
    assert tree["optim"]["minibatches"] == 2
    assert tree["run"]["max_steps"] == 1000 // 4
    assert tree["checkpoint"] == {"every": 25}
    assert tree["eval"]["every"] == 13  # 12.5 batches, rounded up
    assert tree["optim"]["warmup_steps"] == 25  # a tenth of the batches
    assert tree["optim"]["betas"] == [0.9, 0.99]
    assert (tree["optim"]["eps"], tree["optim"]["weight_decay"], tree["optim"]["max_grad_norm"]) == (1e-7, 0.01, 0.5)
    assert tree["kl"] == {"beta": 0.04, "estimator": "k3", "gradient": "rho", "reduction": "loss"}
    assert tree["rollout"]["max_completion_length"] == 768
    assert (tree["data"]["max_prompt_length"], tree["data"]["truncation"]) == (256, "left")
    assert tree["model"]["lora"] == {"r": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}
    rows = {row.name: row for row in result.rows}
    assert "read from GRPOConfig" in rows["args"].note
    assert "Keel keeps 3" in rows["save_total_limit"].note
    assert "updates" in rows["max_steps"].note


def test_a_package_that_this_machine_lacks_is_no_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = written(tmp_path, "train.py", TRL_SCRIPT)
    result = migrate(path)
    assert result.refused is None
    assert "pip install bitsandbytes" in result.missing
    assert main(["migrate", str(path)]) == 0
    shown = capsys.readouterr().err
    assert "To run it on this machine" in shown
    assert "51 options mapped, 1 without a counterpart, 3 to set by hand" in shown
    assert "To set by hand: " in shown
    with pytest.raises(KeelError, match="bitsandbytes"):
        load_config({"optim": {"optimizer": "adamw8bit"}})


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
        {"gradient_accumulation_steps": 4, "num_iterations": 3},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_iterations": 2},
        {"generation_batch_size": 64, "per_device_train_batch_size": 16},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {},
    ],
)
def test_steps_are_counted_as_trls_trainer_counts_them(tmp_path, options):
    """TRL's own configuration says when its trainer generates and when it updates; both are counted off here."""
    from trl import GRPOConfig

    given = {"max_steps": 240, "save_steps": 48, "eval_steps": 24, "warmup_steps": 24, "num_generations": 4, **options}
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    period, accumulated = theirs.steps_per_generation * theirs.num_iterations, theirs.gradient_accumulation_steps
    generations = sum(slice_ % period == 0 for slice_ in range(theirs.max_steps * accumulated))
    completions = theirs.max_steps * accumulated * theirs.per_device_train_batch_size // theirs.num_iterations
    batches = generations // max(1, accumulated // period)  # generations that one update spans are one batch
    direct, notes = read_config({**given, "per_device_train_batch_size": theirs.per_device_train_batch_size})
    migrated = load_config(dict(migrate(written(tmp_path, "a.json", given)).tree))
    for config in (direct, migrated):
        assert config.run.max_steps == batches
        assert config.loss.num_iterations * config.optim.minibatches * batches == theirs.max_steps
        assert config.rollout.prompts_per_step * config.rollout.num_generations * batches == completions
        assert (config.checkpoint.every, config.eval.every) == (-(-batches // 5), -(-batches // 10))
        assert config.optim.warmup_steps == batches // 10
    assert f"max_steps became run.max_steps={batches}" in notes or batches == 240


def test_keels_own_names_keep_keels_unit():
    assert load_config({"max_steps": 100, "loss": {"num_iterations": 4}}).run.max_steps == 100
    assert load_config({"loss": {"num_iterations": 4}}, ["--max-steps=100"]).run.max_steps == 100


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3, "steps_per_generation": 8},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2},
    ],
)
def test_updates_that_no_batch_divides_into_are_left_to_the_user(options):
    with pytest.raises(KeelError, match="by hand"):
        load_config({**options, "per_device_train_batch_size": 8})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"warmup_ratio": 0.05}, "warmup_ratio"),
        ({"eval_strategy": "epoch"}, "eval_strategy"),
        ({"save_strategy": "epoch"}, "save_strategy"),
        ({"beta": 0.01}, "num_train_epochs"),  # three passes, in silence
        ({"num_train_epochs": 2, "max_steps": -1}, "num_train_epochs"),
    ],
)
def test_what_only_the_user_knows_is_set_by_hand(tmp_path, given, name):
    result = migrate(written(tmp_path, "a.json", {"learning_rate": 1e-6, **given}))
    assert name in [row.name for row in result.rows if row.by_hand]
    assert "max_steps" not in result.tree.get("run", {})
    assert result.refused is None


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("given", [{}, {"epsilon_high": 0.3}, {"epsilon": 0.1}, {"scale_rewards": False}])
def test_clipping_and_scaling_are_trls_own_in_silence(tmp_path, loss_type, given):
    """Keel's dapo clips at 1.28 and its dr_grpo does not scale unless told; TRL's differ by their reduction alone."""
    from trl import GRPOConfig

    from keel.losses import resolve_limits, scale_rewards

    given = {"loss_type": loss_type, **given}
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    config = load_config(dict(migrate(written(tmp_path, "a.json", given)).tree))
    limits = resolve_limits(config.loss)
    high = theirs.epsilon if theirs.epsilon_high is None else theirs.epsilon_high
    assert (limits.low, limits.high, config.loss.delta) == (theirs.epsilon, high, theirs.delta)
    assert scale_rewards(config.loss) == theirs.scale_rewards


def test_arguments_without_a_name_are_read(tmp_path):
    script = 'GRPOTrainer("Qwen/Qwen3-0.6B", [accuracy], GRPOConfig("out/first", beta=0.1, max_steps=9))'
    result = migrate(written(tmp_path, "a.py", script))
    assert result.tree["model"]["name"] == "Qwen/Qwen3-0.6B"
    assert (result.tree["run"]["dir"], result.tree["run"]["name"]) == ("out", "first")
    assert set(reasons(result)) == {"reward_funcs", "data.path"}


def test_a_beta_that_is_computed_is_not_lost(tmp_path):
    result = migrate(written(tmp_path, "a.py", "GRPOConfig(beta=float(argv[1]), max_steps=3)"))
    assert "beta" in result.refused
    assert "by hand" in result.refused


# ----------------------------------------------------------------------------------------------------- verl


def test_verls_run_script_with_variables(tmp_path):
    result = migrate(written(tmp_path, "run.sh", VERL_SCRIPT))
    tree = result.tree
    assert result.refused is None
    kl = {"beta": 0.002, "placement": "loss", "reduction": "loss", "estimator": "k3", "gradient": "plain"}
    assert tree["kl"] == kl
    assert (tree["data"]["max_prompt_length"], tree["data"]["truncation"]) == (2048, "drop")
    assert tree["rollout"]["max_completion_length"] == 8192
    assert (tree["rollout"]["prompts_per_step"], tree["rollout"]["num_generations"]) == (512, 16)
    assert (tree["optim"]["minibatches"], tree["optim"]["warmup_steps"]) == (4, 20)
    assert (tree["loss"]["epsilon"], tree["loss"]["epsilon_high"], tree["loss"]["baseline"]) == (
        0.2,
        0.28,
        "group_mean",
    )
    assert (tree["eval"]["k"], tree["eval"]["temperature"]) == ([1, 4], 0.6)
    assert (tree["run"]["max_steps"], tree["run"]["name"]) == (400, "qwen-7b")
    assert tree["log"]["wandb"] == {"project": "DAPO"}
    # variables of the environment, of a condition, of a command: the user's to set, and not in the result
    shell = {name for name, reason in reasons(result).items() if "shell variable: set by hand" in reason}
    assert shell == {"data.train_files", "data.val_files", A + "optim.lr", "trainer.n_gpus_per_node"}
    assert "learning_rate" not in tree["optim"]
    assert "path" not in tree["data"]
    assert "score(data_source" in reasons(result)["custom_reward_function.path"]
    assert set(reasons(result)) - shell == {
        "custom_reward_function.path",
        "custom_reward_function.name",
        R + "max_num_batched_tokens",
        "actor_rollout_ref.model.override_config.attention_dropout",
    }
    assert "use_kl_loss" not in {row.name for row in result.rows}
    assert "beta" not in {row.name for row in result.rows}


def test_verls_yaml_with_interpolations(tmp_path):
    result = migrate(written(tmp_path, "verl.yaml", VERL_YAML))
    tree = result.tree
    assert tree["rollout"]["max_completion_length"] == 2048
    assert tree["run"]["dir"] == "ckpt/maths/first"
    assert tree["loss"]["num_iterations"] == 2
    assert tree["optim"]["warmup_steps"] == 7
    assert tree["optim"]["minibatches"] == 2  # 512 by verl's 256
    assert tree["optim"]["weight_decay"] == 0.01
    by_hand = {row.name for row in result.rows if row.by_hand}
    assert {"actor_rollout_ref.model.path", A + "use_kl_loss", "trainer.save_freq"} <= by_hand
    assert A + "use_kl_loss" in result.refused  # nobody can say whether the penalty enters the loss
    settled = migrate(written(tmp_path, "b.yaml", VERL_YAML.replace("${algorithm.kl_loss}", "false")))
    assert settled.refused is None
    assert settled.tree["kl"]["placement"] == "reward"


GRPO = {"algorithm.adv_estimator": "grpo", R + "n": 4, "data.train_batch_size": 256}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {A + "use_kl_loss": True},
            {"beta": 0.001, "estimator": "k3", "gradient": "plain", "placement": "loss", "reduction": "loss"},
        ),
        (
            {A + "use_kl_loss": True, A + "kl_loss_coef": 0.01, A + "kl_loss_type": "k2"},
            {"beta": 0.01, "estimator": "k2", "gradient": "plain", "placement": "loss", "reduction": "loss"},
        ),
        (
            {"algorithm.use_kl_in_reward": True},
            {"beta": 0.001, "estimator": "k1", "placement": "reward", "controller": {"name": "fixed"}},
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
            {
                "beta": 0.001,
                "estimator": "k1",
                "placement": "reward",
                "controller": {"name": "ziegler", "unit": "per_token", "horizon": 10000, "target": 0.1},
            },
        ),
        ({}, {"beta": 0.0}),
        ({A + "kl_loss_coef": 0.01}, {"beta": 0.0}),  # verl's switch is off in silence
    ],
)
def test_the_kl_term_of_a_verl_file_is_kept(tmp_path, options, expected):
    result = migrate(written(tmp_path, "a.json", {**GRPO, **options}))
    assert result.refused is None
    assert result.tree["kl"] == expected
    config = load_config(yaml.safe_load(result.yaml()))
    assert config.kl.beta == expected["beta"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({A + "use_kl_loss": True, A + "kl_loss_coef": 0.0}, "is on but β is 0"),
        ({A + "use_kl_loss": "False"}, "use_kl_loss is 'False': expected true or false"),
        (
            {A + "use_kl_loss": True, A + "kl_loss_coef": "$COEF"},
            "the KL term depends on actor_rollout_ref.actor.kl_loss_coef=$COEF",
        ),
        ({"algorithm.use_kl_in_reward": 1}, "use_kl_in_reward is 1"),
        ({A + "use_kl_loss": True, "algorithm.use_kl_in_reward": True}, "both true"),
        ({"algorithm.adv_estimator": "gae"}, "needs a critic"),
        ({"algorithm.adv_estimator": "remax"}, "known: grpo, rloo"),
        ({R + "response_length": 64, "data.max_response_length": 128}, "both set rollout.max_completion_length"),
        ({R + "n": 1}, "rollout.num_generations is 1"),
    ],
)
def test_what_would_train_otherwise_than_the_file_says_is_refused(tmp_path, options, said):
    path = written(tmp_path, "a.json", {**GRPO, **options})
    assert said in migrate(path).refused
    assert main(["migrate", str(path)]) == 1


def test_a_switch_without_its_coefficient_is_refused_in_a_configuration():
    """Loaded as it is, nothing fills in verl's 0.001, and β would stay 0."""
    with pytest.raises(KeelError, match=r"kl_loss_coef.*kl\.beta"):
        load_config({A + "use_kl_loss": True})
    assert load_config({A + "use_kl_loss": True, "kl": {"beta": 0.1}}).kl.beta == 0.1


def test_clipping_and_scaling_are_verls_own_in_silence(tmp_path):
    sums = {**GRPO, A + "loss_agg_mode": "seq-mean-token-sum-norm"}
    loss = migrate(written(tmp_path, "a.json", sums)).tree["loss"]
    assert loss == {
        "loss_type": "dr_grpo",
        "baseline": "group_mean",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "delta": 3.0,
    }
    rloo = migrate(written(tmp_path, "b.json", {**GRPO, "algorithm.adv_estimator": "rloo"})).tree["loss"]
    assert (rloo["baseline"], rloo["scale_rewards"]) == ("leave_one_out", "none")


def test_a_silent_verl_file_is_ppo_and_refused(tmp_path):
    result = migrate(written(tmp_path, "a.json", {A + "optim.lr": 1e-6}))
    assert "algorithm.adv_estimator=gae, verl's default: it needs a critic" in result.refused
    silent = {row.name: row for row in result.rows if row.silent}
    assert set(silent) == {*defaults("verl"), "model.name", "data.path"}
    assert silent[A + "ppo_mini_batch_size"].options == {"optim.minibatches": 4}
    assert silent["trainer.total_epochs"].by_hand
    assert not set(defaults(f"verl with {A}use_kl_loss")) & set(silent)


def test_an_option_given_twice_in_a_script_is_refused(tmp_path):
    words = "python -m verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n={} actor_rollout_ref.rollout.n=8"
    twice = migrate(written(tmp_path, "a.sh", words.format(4)))
    assert f"{R}n is given twice, as 4 and as 8" in twice.refused
    assert migrate(written(tmp_path, "b.sh", words.format(8))).refused is None


def test_what_keel_does_anyway_is_not_counted_as_lost(tmp_path, capsys):
    fine = {"push_to_hub": False, "trainer.val_before_train": True, "trainer.nnodes": 1}
    result = migrate(written(tmp_path, "a.json", {**GRPO, **fine}))
    assert not [row for row in result.unmapped if not row.silent]
    odd = {"push_to_hub": True, "trainer.val_before_train": False, "trainer.nnodes": 2}
    lost = reasons(migrate(written(tmp_path, "b.json", {**GRPO, **odd})))
    assert set(odd) <= set(lost)


# ---------------------------------------------------------------------------------------------------- shell


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a=2; b=3\nx --max_steps $((a * (b + 1)))", 8),
        ("a=2\nb=$((a+1))\nx --max_steps=$((b % 2))", 1),
        ("a=7\nx --max_steps ${a} \\\n  --beta 0.1", 7),
        ("x --max_steps ${a:-5}", 5),
        ("max_steps=3\nx --max_steps 4 > max_steps.log", 4),
        ("export a=6 && x max_steps=$a", 6),
        ("# max_steps=1\nx max_steps=9 # max_steps=2", 9),
        ("ARGS=(\n  max_steps.x=1\n  --max_steps=3)\nx", 3),
        ("a=1\na=2\nx --max_steps $a", None),
        ("x --max_steps $((__import__('os')))", None),
        ("x --max_steps $((2 ** 9999999))", None),
        ("a=$((a + 1))\nx --max_steps $a", None),
        ("x --max_steps $(nproc)", None),
        ("x --max_steps $STEPS", None),
    ],
)
def test_shell_values(tmp_path, script, expected):
    result = migrate(written(tmp_path, "a.sh", script + "\nx --learning_rate 1e-6\n"))
    assert result.tree.get("run", {}).get("max_steps") == expected
    rows = {row.name: row for row in result.rows}
    assert "max_steps" not in rows or expected is not None or "by hand" in rows["max_steps"].reason


def test_a_flag_takes_all_its_words(tmp_path):
    result = migrate(written(tmp_path, "a.sh", 'trl grpo --reward_weights 1.0 0.5 --use_vllm --beta 0.1 "$@" &'))
    values = {row.name: row.value for row in result.rows if not row.silent}
    assert values == {"reward_weights": [1.0, 0.5], "use_vllm": True, "beta": 0.1}


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ({}, {"model.name", "data.path"}),
        ({"model_name_or_path": "Qwen/Qwen3-0.6B"}, {"data.path"}),
        ({"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "openai/gsm8k"}, set()),
    ],
)
def test_a_model_and_data_that_the_file_does_not_name_are_left_to_the_user(tmp_path, named, left):
    """The default's would be trained in their place."""
    result = migrate(written(tmp_path, "a.json", {"max_steps": 9, "beta": 0.1, "num_generations": 8, **named}))
    by_hand = {row.name for row in result.rows if row.by_hand}
    assert by_hand & {"model.name", "data.path"} == left
