"""Names of other trainers: each leads to its option, however it is given; a name that nobody has leads nowhere."""

import random
import re
import string
from importlib.resources import files

import pytest

from keel.base.errors import KeelError
from keel.base.options import option_names, similar_options
from keel.base.parts import parameters_of
from keel.base.yaml_text import parse
from keel.cli import main
from keel.cli.app import split
from keel.config import Config, load_config, read_config
from keel.config.load import unknown_option
from keel.config.peers import table, tables
from keel.envs.registry import TASKS, get_task

# What users of TRL, verl, OpenRLHF and small trainers type first: (name, value, the option with its value).
ACCEPTED = [
    ("lr", "1e-5", "optim.learning_rate=1e-05"),
    ("actor_lr", "1e-5", "optim.learning_rate=1e-05"),
    ("actor_learning_rate", "1e-5", "optim.learning_rate=1e-05"),
    ("learning_rate", "1e-5", "optim.learning_rate=1e-05"),
    ("kl_coef", "0.01", "kl.beta=0.01"),
    ("init_kl_coef", "0.01", "kl.beta=0.01"),
    ("kl_loss_coef", "0.01", "kl.beta=0.01"),
    ("kl_coefficient", "0.01", "kl.beta=0.01"),
    ("beta", "0.01", "kl.beta=0.01"),
    ("kl_target", "0.05", "kl.controller.target=0.05"),
    ("target_kl", "0.05", "kl.controller.target=0.05"),
    ("kl_estimator", "k1", "kl.estimator=k1"),
    ("kl_loss_type", "low_var_kl", "kl.estimator=k3"),
    ("clip_range", "0.1", "loss.epsilon=0.1"),
    ("cliprange", "0.1", "loss.epsilon=0.1"),
    ("clip_ratio", "0.1", "loss.epsilon=0.1"),
    ("clip_coef", "0.1", "loss.epsilon=0.1"),
    ("eps_clip", "0.1", "loss.epsilon=0.1"),
    ("epsilon_high", "0.3", "loss.epsilon_high=0.3"),
    ("clip_ratio_high", "0.3", "loss.epsilon_high=0.3"),
    ("ppo_epochs", "2", "loss.num_iterations=2"),
    ("num_ppo_epochs", "2", "loss.num_iterations=2"),
    ("mu", "2", "loss.num_iterations=2"),
    ("fsdp", "full_shard auto_wrap", "parallel.sharding=full"),
    ("fsdp", "hybrid_shard offload", "parallel.offload=true"),
    ("fsdp", "true", "parallel.sharding=full"),
    ("zero_stage", "3", "parallel.sharding=full"),
    ("zero_stage", "0", "parallel.sharding=none"),
    ("zero_optimization.stage", "3", "parallel.sharding=full"),
    ("sharding_strategy", "HYBRID_SHARD", "parallel.sharding=hybrid"),
    ("actor.strategy", "fsdp2", "parallel.sharding=full"),
    ("actor.fsdp_config.fsdp_size", "4", "parallel.shard_size=4"),
    ("actor.fsdp_config.param_offload", "true", "parallel.offload=true"),
    ("actor.fsdp_config.optimizer_offload", "true", "optim.offload=true"),
    ("fsdp_cpu_offload", "true", "parallel.offload=true"),
    ("offload_param_device", "cpu", "parallel.offload=true"),
    ("update_epochs", "2", "loss.num_iterations=2"),
    ("entropy_coeff", "0.1", "loss.entropy_coef=0.1"),
    ("ent_coef", "0.1", "loss.entropy_coef=0.1"),
    ("loss_agg_mode", "token-mean", "loss.loss_type=dapo"),
    ("adv_estimator", "rloo", "loss.baseline=leave_one_out"),
    ("advantage_estimator", "group_norm", "loss.scale_rewards=group"),
    ("no_advantage_std_norm", "true", "loss.scale_rewards=none"),
    ("group_size", "4", "rollout.num_generations=4"),
    ("n_samples_per_prompt", "4", "rollout.num_generations=4"),
    ("num_return_sequences", "4", "rollout.num_generations=4"),
    ("n_rollouts", "4", "rollout.num_generations=4"),
    ("num_generations", "4", "rollout.num_generations=4"),
    ("num_prompts_per_step", "4", "rollout.prompts_per_step=4"),
    ("max_new_tokens", "32", "rollout.max_completion_length=32"),
    ("max_completion_length", "32", "rollout.max_completion_length=32"),
    ("max_response_length", "32", "rollout.max_completion_length=32"),
    ("response_length", "32", "rollout.max_completion_length=32"),
    ("generate_max_len", "32", "rollout.max_completion_length=32"),
    ("prompt_max_len", "32", "data.max_prompt_length=32"),
    ("temperature", "0.9", "rollout.temperature=0.9"),
    ("top_p", "0.9", "rollout.top_p=0.9"),
    ("clip_grad", "0.5", "optim.max_grad_norm=0.5"),
    ("grad_clip", "0.5", "optim.max_grad_norm=0.5"),
    ("max_grad_norm", "0.5", "optim.max_grad_norm=0.5"),
    ("lr_warmup_steps", "5", "optim.warmup_steps=5"),
    ("weight_decay", "0.1", "optim.weight_decay=0.1"),
    ("lr_scheduler", "cosine", "optim.schedule=cosine"),
    ("num_mini_batches", "2", "optim.minibatches=2"),
    ("ppo_mini_batch_size", "8", "optim.minibatches=2"),
    ("bf16", "true", "optim.precision=bfloat16"),
    ("pretrain", "some/model", "model.name=some/model"),
    ("model_name_or_path", "some/model", "model.name=some/model"),
    ("lora_r", "8", "model.lora.r=8"),
    ("lora_rank", "8", "model.lora.r=8"),
    ("lora_alpha", "8", "model.lora.alpha=8"),
    ("use_peft", "true", "model.lora={}"),
    ("use_lora", "true", "model.lora={}"),
    ("base_model", "some/model", "model.name=some/model"),
    ("flash_attention", "true", "model.attn_implementation=flash_attention_2"),
    ("anneal_lr", "true", "optim.schedule=linear"),
    ("stop_sequences", "[END]", "rollout.stop=[END]"),
    ("system_prompt", "Think.", "data.system_prompt=Think."),
    ("train_file", "some/data", "data.path=some/data"),
    ("dataset_path", "some/data", "data.path=some/data"),
    ("save_dir", "out/first", "run.dir=out"),
    ("resume", "true", "run.if_exists=resume"),
    ("resume_from_checkpoint", "true", "run.if_exists=resume"),
    ("steps", "120", "run.max_steps=120"),
    ("total_steps", "120", "run.max_steps=120"),
    ("gradient_checkpointing", "true", "model.gradient_checkpointing=true"),
    ("prompt_data", "some/data", "data.path=some/data"),
    ("dataset_name", "some/data", "data.path=some/data"),
    ("input_key", "question", "data.columns.prompt=question"),
    ("sync_ref_model", "true", "reference.kind=ema"),
    ("save_freq", "5", "checkpoint.every=5"),
    ("save_steps", "5", "checkpoint.every=5"),
    ("test_freq", "5", "eval.every=5"),
    ("eval_steps", "5", "eval.every=5"),
    ("exp_name", "first", "run.name=first"),
    ("experiment_name", "first", "run.name=first"),
    ("output_dir", "out/first", "run.dir=out"),
    ("max_steps", "5", "run.max_steps=5"),
    ("total_training_steps", "5", "run.max_steps=5"),
    ("seed", "5", "run.seed=5"),
    ("report_to", "none", "log.tensorboard=false"),
    # in a section of another trainer, or in the wrong one of Keel's
    ("optim.lr", "1e-5", "optim.learning_rate=1e-05"),
    ("warmstart.lr", "1e-5", "warmstart.learning_rate=1e-05"),
    ("policy.optimizer.kwargs.lr", "1e-5", "optim.learning_rate=1e-05"),
    ("actor.optim.lr", "1e-5", "optim.learning_rate=1e-05"),
    ("grpo.beta", "0.01", "kl.beta=0.01"),
    ("kl.kl_coef", "0.01", "kl.beta=0.01"),
    ("algorithm.kl_ctrl.kl_coef", "0.001", "kl.beta=0.001"),
    ("actor_rollout_ref.rollout.n", "4", "rollout.num_generations=4"),
    ("rollout.n", "4", "rollout.num_generations=4"),
    ("rollout.n_samples_per_prompt", "4", "rollout.num_generations=4"),
    ("model.lora.rank", "8", "model.lora.r=8"),
]
# Another meaning or unit: refused in a line that names the option and what to write.
REFERRED = [
    ("rollout_batch_size", "64", "rollout.prompts_per_step=64"),
    ("train_batch_size", "64", "set rollout.prompts_per_step, or optim.minibatches"),
    ("use_kl_penalty", "true", "set kl.beta above 0, such as kl.beta=0.01"),
    ("use_kl_loss", "true", "or kl.beta ("),
    ("kl_penalty", "low_var_kl", "set kl.estimator=k3"),
    ("adap_kl_ctrl", "true", "kl.controller={name: ziegler, target: T}"),
    ("max_epochs", "2", "set loss.num_iterations=2, "),
    ("num_train_epochs", "2", "set run.max_steps"),
    ("total_episodes", "2", "set run.max_steps"),
    ("warmup_ratio", "0.1", "set run.max_steps"),
    ("max_length", "64", "rollout.max_completion_length"),
    ("reward_funcs", "accuracy", "rewards: [{name, weight}]"),
    ("reward_fn", "exact", "rewards=[{name: exact}]"),
    ("reward_func", "exact", "rewards=[{name: exact}]"),
    ("reward_functions", "exact", "rewards=[{name: exact}]"),
    ("reward_model", "some/model", "rewards: [{name, weight}]"),
    ("reward_scale", "2", "rewards=[{name: task, weight: 2}]"),
    ("advantage_eps", "1e-8", "loss.scale_rewards"),
    ("advantage_epsilon", "1e-8", "loss.scale_rewards"),
    ("norm_adv", "true", "loss.scale_rewards"),
    ("num_rollouts", "4", "rollout.num_generations=4"),
    ("n_steps", "4", "run.max_steps=4"),
    ("rollout_steps", "4", "run.max_steps=4"),
    ("num_prompts", "4", "rollout.prompts_per_step=4"),
    ("gradient_accumulation", "4", "optim.microbatch_tokens"),
    ("num_gpus", "4", "keel train CONFIG --nproc N"),
    ("world_size", "8", "keel train CONFIG --nproc N"),
    ("nproc_per_node", "8", "keel train CONFIG --nproc N"),
    ("trainer.n_gpus_per_node", "8", "keel train CONFIG --nproc N"),
    ("actor_num_gpus_per_node", "8", "keel train CONFIG --nproc N"),
    ("num_processes", "8", "keel train CONFIG --nproc N"),
    ("tensor_parallel_size", "2", "parallel.sharding=full"),
    ("tensor_model_parallel_size", "2", "parallel.sharding=full"),
    ("vllm_tensor_parallel_size", "2", "keel serve MODEL --tensor-parallel-size 2"),
    ("context_parallel_size", "2", "optim.microbatch_tokens"),
    ("sequence_parallel_size", "2", "model.gradient_checkpointing=true"),
    ("ulysses_sequence_parallel_size", "2", "optim.microbatch_tokens"),
    ("ring_attn_size", "2", "optim.microbatch_tokens"),
    ("pipeline_parallel_size", "2", "parallel.sharding=full"),
    ("expert_parallel_size", "2", "parallel.sharding=full"),
    ("deepspeed", "zero3.json", "parallel.sharding"),
    ("fsdp", "shard_everything", "shard_everything is not one of full_shard"),
    ("actor.strategy", "megatron", "known: fsdp, fsdp2"),
    ("fsdp_cpu_offload", "maybe", "expected true or false"),
    ("log_dir", "out", "run.dir=out"),
    ("max_seq_len", "64", "rollout.max_completion_length"),
    ("kl_clip", "5", "kl.log_ratio_clamp"),
    ("max_kl", "0.1", "kl.budget=0.1"),
    ("keep_top_k", "2", "checkpoint.keep=2"),
    ("ref_update_steps", "10", "set reference.kind=snapshot"),
    ("resume", "runs/first", "keel train --resume RUN"),
    ("r_policy_malformed", "-0.3", "task.malformed=-0.3"),
    ("r_env_malformed", "-0.3", "task.malformed=-0.3"),
    ("mix_env_ratio", "0.2", "task.environment=0.2"),
    ("lam", "0.95", "GRPO has no critic"),
    ("vf_loss_coef", "0.1", "GRPO has no critic"),
    ("cliprange_value", "0.2", "GRPO has no critic"),
    ("ref_model", "some/model", "reference.kind"),
    ("vf_coef", "0.1", "GRPO has no critic"),
    ("critic.optim.lr", "1e-5", "GRPO has no critic"),
    ("loss.clip_range", "0.1", "did you mean loss.epsilon?"),
    ("train_dataset.batch_size", "8", "did you mean rollout.prompts_per_step or warmstart.batch_size?"),
]
# Nothing to set, since Keel does so anyway: a note says it.
NOT_NEEDED = [
    ("micro_batch_size", "8", "optim.microbatch_tokens"),
    ("ppo_micro_batch_size_per_gpu", "8", "optim.microbatch_tokens"),
    ("gradient_accumulation_steps", "8", "rollout.prompts_per_step"),
    ("logging_steps", "1", "every step is logged"),
    ("advantage_eps", "0.0001", "1e-4 is added"),
    ("num_gpus", "1", "--nproc N"),
    ("tensor_model_parallel_size", "1", "parallel.sharding=full"),
]


def notes_of(source, *overrides):
    return read_config(source, overrides)[1]


def refusal(name, value="1"):
    with pytest.raises(KeelError) as caught:
        load_config({}, [f"{name}={value}"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "value", "becomes"), ACCEPTED, ids=[name for name, _, _ in ACCEPTED])
def test_a_peers_name_is_its_option(name, value, becomes):
    note = notes_of({"warmstart": {"task": ["arithmetic"], "steps": 1}}, f"{name}={value}")[0]
    assert note.startswith(f"{name} became ")
    assert becomes in note.split()


@pytest.mark.parametrize(("name", "value", "says"), REFERRED, ids=[name for name, _, _ in REFERRED])
def test_a_name_of_another_meaning_is_refused_with_what_to_write(name, value, says):
    assert says in refusal(name, value)


@pytest.mark.parametrize(("name", "value", "says"), NOT_NEEDED, ids=[name for name, _, _ in NOT_NEEDED])
def test_what_needs_no_option_is_said(name, value, says):
    assert f"{name}={value} has no effect: " in notes_of({}, f"{name}={value}")[0]
    assert says in notes_of({}, f"{name}={value}")[0]


@pytest.mark.parametrize("name", ["lr", "clip_range", "group_size", "optim.lr", "grpo.beta", "actor.kl_loss_coef"])
def test_every_way_in_is_the_same(name, tmp_path, capsys):
    value = 4 if name == "group_size" else 0.001
    section, _, leaf = name.rpartition(".")
    expected, [note] = read_config({name: value})
    path = tmp_path / "a.yaml"
    path.write_text(f"{section}:\n  {leaf}: {value}\n" if section else f"{name}: {value}\n")
    assert read_config(path) == (expected, [note])
    for words in ([f"{name}={value}"], [f"--{name}={value}"], [f"--{name.replace('_', '-')}", str(value)]):
        assert read_config({}, split(words)[1]) == (expected, [note])
        assert main(["train", str(path), "--print-config", *words]) == 0
        assert note in capsys.readouterr().err


def test_names_that_share_a_line_agree_with_each_other():
    together = {"rollout_batch_size": 32, "n_samples_per_prompt": 4, "train_batch_size": 64, "max_epochs": 2}
    config = load_config(together)
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (32, 4)
    assert (config.optim.minibatches, config.loss.num_iterations) == (2, 2)
    assert load_config({"use_kl_penalty": True, "kl_coef": 0.02}).kl.beta == 0.02
    assert load_config({"use_kl_penalty": False}).kl.beta == 0.0
    [note] = notes_of({}, "use_kl_penalty=true", "kl.beta=0.02")
    assert note.startswith("use_kl_penalty=true (kl.beta) has no effect: ")
    config = load_config({"ref_update_steps": 10, "reference.kind": "snapshot"})
    assert config.reference.params["every"] == 10
    assert load_config({"use_lora": False, "lora_r": 8}).model.lora is None
    with pytest.raises(KeelError, match=r"both set kl\.beta"):
        load_config({"use_kl_penalty": False, "kl_coef": 0.02})
    config = load_config({"use_kl_loss": True, "kl_loss_coef": 0.02, "kl_loss_type": "mse"})
    assert (config.kl.beta, config.kl.estimator, config.kl.placement) == (0.02, "k2", "loss")
    config = load_config({"pretrain": "tiny", "init_kl_coef": 0.02})  # OpenRLHF's goes into the reward
    assert (config.kl.beta, config.kl.estimator, config.kl.placement) == (0.02, "k1", "reward")
    assert load_config({"lora_rank": 0, "lora_alpha": 16}).model.lora is None
    with pytest.raises(KeelError, match="does not divide 128 completions a step"):
        load_config({**together, "train_batch_size": 96})


def test_a_group_is_counted_under_each_of_its_names():
    names = {name for name, alias in table().items() if alias.target == "rollout.num_generations" and not alias.convert}
    assert {"group_size", "n_rollouts", "num_return_sequences", "actor_rollout_ref.rollout.n"} < names
    for name in (*names, "rollout.n", "rollout.num_generations"):
        config = load_config({name: 4, "per_device_train_batch_size": 32})
        assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (8, 4)
        if name == "n_samples_per_prompt":  # OpenRLHF's, whose batches are prompts
            continue
        with pytest.raises(KeelError, match=r"32 completions set rollout\.prompts_per_step=8"):
            load_config({name: 4, "rollout_batch_size": 32})
        with pytest.raises(KeelError, match=rf"{name} is 0: give a whole number, at least 1"):
            load_config({name: 0, "rollout_batch_size": 32})


@pytest.mark.parametrize("batch", [4, 10])
def test_a_batch_of_no_whole_groups_is_said_so(batch):
    line = refusal("rollout_batch_size", batch)
    assert line.endswith(f"{batch} completions are not a multiple of rollout.num_generations=8")
    assert f"rollout.prompts_per_step={batch};" in line


def test_a_secret_that_a_peer_takes_as_an_option_is_not_repeated():
    config, notes = read_config({}, ["use_wandb=0123456789abcdef", "wandb_project=mine"])
    assert config.log.wandb.project == "mine"
    assert notes[0] == "use_wandb became log.wandb={}"


def test_a_name_is_in_one_table_alone():
    names = [alias.name for aliases in tables().values() for alias in aliases]
    assert len(names) == len(set(names))
    assert parse(files("keel.config").joinpath("peers.yaml").read_text("utf-8"), "peers.yaml")  # no key is given twice


# --------------------------------------------------------------------------------------------- neighbours

OPTIONS = [option for option in option_names(Config) if "." in option]


def misspelt(name, rng):
    """The name with one letter missing, doubled, replaced, or swapped with the next."""
    at = rng.randrange(len(name))
    letter = rng.choice(string.ascii_lowercase)
    return rng.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + letter + name[at:],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :],
        ]
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_with_one_slip_leads_to_itself(option):
    rng = random.Random(option)
    for _ in range(20):
        name = misspelt(option, rng)
        if name not in OPTIONS and name.count(".") == option.count(".") and not name.startswith("."):
            assert option in similar_options(name, OPTIONS, {}), name


WORDS = ["banana", "umbrella", "giraffe", "quark", "xyz", "foo", "qwerty", "window", "castle", "piano", "fjord_glyph"]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_nothing_leads_nowhere(word):
    assert similar_options(word, OPTIONS, {name: alias.target for name, alias in table().items()}) == []
    assert "no similar option; `keel train --print-config` shows every option" in refusal(word)


def test_a_short_word_is_not_taken_for_another():
    assert (
        similar_options("lx", OPTIONS, {})
        == similar_options("rr", OPTIONS, {})
        == similar_options("kk", OPTIONS, {})
        == []
    )


def test_a_parameter_of_a_task_leads_to_its_section():
    options = {name.rpartition(".")[2] for name in OPTIONS} | set(Config.model_fields) | set(table())
    for task in TASKS:
        for parameter in set(parameters_of(get_task(task))) - options:
            assert f"task.{parameter}" in str(unknown_option(parameter, task=task))
            assert re.search(rf"task\.{parameter} \(of .*{task}", str(unknown_option(parameter)))
    assert "task.noise_rate (of multihop)" in refusal("noise_rate", "0.5")
    assert "task.noise_rate (of multihop)" in refusal("env.noise_rate", "0.5")
    with pytest.raises(KeelError, match=r"unknown option noise_rat: did you mean task\.noise_rate\?"):
        load_config({"task": {"name": "multihop"}, "noise_rat": 0.5})
    with pytest.raises(KeelError, match=r"did you mean kl\.level or kl\.teacher\.level or loss\.mismatch\.level\?"):
        load_config({"task": {"name": "no_such_task"}, "level": 3})
    with pytest.raises(KeelError, match="unknown option noise_rate"):
        load_config({"task": {"name": ["multihop"]}, "noise_rate": 0.5})
