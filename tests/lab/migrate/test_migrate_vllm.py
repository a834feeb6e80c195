"""`keel migrate` and vLLM: the engine stays vLLM, with the file's values; what it takes elsewhere is said."""

import json
from dataclasses import fields

import pytest
import yaml

from keel.base.errors import KeelError
from keel.config import load_config, peers
from keel.config.load import is_option
from keel.lab.migrate import migrate

MODEL = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "openai/gsm8k", "num_generations": 8}
VERL = {"model": {"path": "Qwen/Qwen2.5-0.5B"}, "actor": {"use_kl_loss": True, "kl_loss_coef": 0.001}}


def migrated(tmp_path, content, name="peer.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return migrate(path)


def trl(tmp_path, **options):
    return migrated(tmp_path, {**MODEL, **options})


def verl(tmp_path, **rollout):
    data = {"train_files": "train.parquet"}
    peer = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": data,
        "actor_rollout_ref": {**VERL, "rollout": {"n": 4, **rollout}},
    }
    return migrated(tmp_path, peer)


def rollout_of(result):
    """The section of a result that Keel takes, as YAML too."""
    assert result.refused is None
    config = load_config(dict(result.tree))
    assert config.rollout == load_config(yaml.safe_load(result.yaml())).rollout
    return config.rollout


def reasons(result):
    return {row.name: row.reason for row in result.unmapped if not row.silent}


def test_every_vllm_option_of_the_installed_trl_is_in_the_table():
    from trl import GRPOConfig

    names = {field.name for field in fields(GRPOConfig) if "vllm" in field.name}
    assert len(names) > 15
    assert not [name for name in names if peers.find(name, is_option) is None]


def test_trl_in_the_process(tmp_path):
    result = trl(
        tmp_path,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.45,
        vllm_max_model_length=4096,
        vllm_tensor_parallel_size=1,
        vllm_enable_sleep_mode=True,
        vllm_server_port=9000,
    )
    rollout = rollout_of(result)
    assert (rollout.engine, rollout.vllm.mode, rollout.vllm.urls) == ("vllm", "colocate", ())
    assert (rollout.vllm.gpu_memory_utilization, rollout.vllm.max_model_len) == (0.45, 4096)
    assert not reasons(result)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ({}, "http://127.0.0.1:8000"),  # TRL's default is 0.0.0.0:8000
        ({"vllm_server_host": "10.0.0.7", "vllm_server_port": 8123}, "http://10.0.0.7:8123"),
        ({"vllm_server_base_url": "https://gpu:9", "vllm_server_host": "10.0.0.7"}, "https://gpu:9"),
    ],
)
def test_trl_at_a_server(tmp_path, address, url):
    """A server has its own memory and GPUs, which TRL does not read either."""
    elsewhere = {"vllm_gpu_memory_utilization": 0.9, "vllm_tensor_parallel_size": 4, "vllm_group_port": 51216}
    result = trl(tmp_path, use_vllm=True, vllm_mode="server", **address, **elsewhere)
    rollout = rollout_of(result)
    assert (rollout.engine, rollout.vllm.mode, rollout.vllm.urls) == ("vllm", "server", (url,))
    assert rollout.vllm.wait_s == 240.0  # TRL's default, Keel's is 120
    assert not reasons(result)
    assert rollout_of(trl(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_timeout=30)).vllm.wait_s == 30.0


def test_several_gpus_in_the_process_are_by_hand(tmp_path):
    result = trl(tmp_path, use_vllm=True, vllm_tensor_parallel_size=2)
    assert rollout_of(result).vllm.tensor_parallel_size == 1
    assert "keel serve MODEL --tensor-parallel-size 2" in reasons(result)["vllm_tensor_parallel_size"]


UNREAD = {
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": None,
    "vllm_structured_outputs_regex": "[0-9]+",
    "vllm_model_impl": "transformers",
}


@pytest.mark.parametrize("switch", [{}, {"use_vllm": False}])
@pytest.mark.parametrize(
    "options",
    [{"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 2}]
    + [{name: value} for name, value in UNREAD.items()],
)
def test_what_trl_does_not_read_is_not_set(tmp_path, switch, options):
    result = trl(tmp_path, **switch, **options)
    assert rollout_of(result).engine == "native"
    assert "vllm" not in result.tree["rollout"]
    assert "mismatch" not in result.tree.get("loss", {})
    assert not reasons(result)


def test_a_switch_that_is_known_at_run_time_alone(tmp_path):
    options = 'use_vllm=a.use_vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=0.4'
    result = migrated(tmp_path, f"from trl import GRPOConfig\nGRPOConfig({options}, num_generations=8)\n", "train.py")
    rollout = rollout_of(result)
    assert (rollout.engine, rollout.vllm.gpu_memory_utilization) == ("vllm", 0.4)
    assert "by hand" in reasons(result)["use_vllm"]


@pytest.mark.parametrize(
    ("options", "mismatch"),
    [
        ({}, ("mask", "sequence", None, 3.0)),  # TRL's defaults, where Keel truncates tokens at 2
        ({"vllm_importance_sampling_mode": "token_truncate"}, ("truncate", "token", None, 3.0)),
        ({"vllm_importance_sampling_clip_min": 0.5}, ("icepop", "sequence", 0.5, 3.0)),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.2},
            ("icepop", "token", 0.2, 3.0),
        ),
        ({"vllm_importance_sampling_cap": 5.0}, ("mask", "sequence", None, 5.0)),
        (
            {"vllm_importance_sampling_cap": 5.0, "vllm_importance_sampling_clip_max": 2.5},
            ("mask", "sequence", None, 5.0),
        ),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask"},
            ("none", "token", None, 2.0),
        ),
    ],
)
def test_trls_correction(tmp_path, options, mismatch):
    result = trl(tmp_path, use_vllm=True, **options)
    assert result.refused is None
    loaded = load_config(dict(result.tree)).loss.mismatch
    assert (loaded.kind, loaded.level, loaded.floor, loaded.cap) == mismatch
    assert not reasons(result)


def test_limits_that_keel_lacks_are_said(tmp_path):
    names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    result = trl(tmp_path, use_vllm=True, **dict(zip(names, ("token_truncate", 0.5, None), strict=True)))
    assert "loss.mismatch.kind=icepop" in reasons(result)[names[1]]
    assert "loss.mismatch.cap by hand" in reasons(result)[names[2]]


def test_structured_outputs_are_refused(tmp_path):
    result = trl(tmp_path, use_vllm=True, vllm_structured_outputs_regex="[0-9]+", vllm_model_impl="transformers")
    assert reasons(result).keys() == {"vllm_structured_outputs_regex", "vllm_model_impl"}


def test_verl(tmp_path):
    rollout = rollout_of(
        verl(tmp_path, name="vllm", gpu_memory_utilization=0.6, enforce_eager=True, max_model_len=2048)
    )
    assert (rollout.engine, rollout.vllm.mode, rollout.vllm.cuda_graphs) == ("vllm", "colocate", False)
    assert (rollout.vllm.gpu_memory_utilization, rollout.vllm.max_model_len) == (0.6, 2048)
    assert rollout_of(verl(tmp_path, name="vllm")).vllm.gpu_memory_utilization == 0.5  # verl's default
    assert rollout_of(verl(tmp_path, enforce_eager=True)).vllm.gpu_memory_utilization == 0.5  # and so is the engine
    two = verl(tmp_path, name="vllm", tensor_model_parallel_size=2, free_cache_engine=True)
    assert rollout_of(two).engine == "vllm"
    assert [name.rpartition(".")[2] for name in reasons(two)] == ["tensor_model_parallel_size"]
    assert rollout_of(verl(tmp_path, name="hf", gpu_memory_utilization=0.6)).engine == "native"


OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain some/model --prompt_data some/prompts --init_kl_coef 1e-3 "
    "--use_kl_loss --kl_estimator k3 --advantage_estimator group_norm --lr_scheduler constant --n_samples_per_prompt 8 "
)


@pytest.mark.parametrize(
    ("engines", "engine"), [("--vllm_num_engines 4", "vllm"), ("--vllm_num_engines 0", "native"), ("", "native")]
)
def test_openrlhf(tmp_path, engines, engine):
    flags = f"{engines} --vllm_gpu_memory_utilization 0.5 --enforce_eager --colocate_all_models --vllm_enable_sleep"
    rollout = rollout_of(migrated(tmp_path, OPENRLHF + flags, "run.sh"))
    assert rollout.engine == engine
    expected = (0.5, False) if engine == "vllm" else (None, True)
    assert (rollout.vllm.gpu_memory_utilization, rollout.vllm.cuda_graphs) == expected


def test_on_the_command_line_too():
    options = ["use_vllm=true", "vllm_mode=server", "vllm_server_port=9000"]
    assert load_config("default", options).rollout.vllm.urls == ("http://127.0.0.1:9000",)
    kept = load_config("default", ["vllm_mode=server", "rollout.engine=vllm", "rollout.vllm.url=http://a:1"])
    assert kept.rollout.vllm.urls == ("http://a:1",)
    with pytest.raises(KeelError, match=r"rollout\.engine"):  # options of an engine that does not sample
        load_config("default", ["vllm_gpu_memory_utilization=0.5"])
