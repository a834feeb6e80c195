"""Peers' options of the sampling engine, sharding, data, loggers and the run's folder."""

from __future__ import annotations

from pathlib import PurePath

from keel.base.errors import KeelError
from keel.config.peer_values import A, Given, Options, V, choice, whole


def one_gpu(given: Given) -> Options:
    """GPUs of one sampler; in the trainer's process it is 1."""
    if (size := whole(given.name, given.value)) == 1:
        return {}
    raise given.refused(
        f"vLLM in the trainer's process uses one GPU; start keel serve MODEL --tensor-parallel-size {size}, and set "
        "rollout.vllm.mode=server and rollout.vllm.url by hand"
    )


def vllm_mode(given: Given) -> Options:
    """Where vLLM samples; a server without an address gets TRL's default."""
    mode = choice(given)
    return {**mode, **(vllm_url(given) if given.value == "server" else {})} if given.samples else {}


def vllm_url(given: Given) -> Options:
    """A server's address, from TRL's host and port."""
    if V + "url" in given.settings:
        return {}
    host = given.first("vllm_server_host", default="0.0.0.0")
    at = "127.0.0.1" if host == "0.0.0.0" else host  # an address to listen on, which clients cannot use
    port = given.first("vllm_server_port", default=8000)
    return {V + "url": given.first("vllm_server_base_url", default=f"http://{at}:{port}")}


def fsdp(given: Given) -> Options:
    """transformers' `fsdp`: words such as full_shard, hybrid_shard, offload and auto_wrap; or true."""
    value = given.value
    if isinstance(value, bool):
        return given.to("full") if value else {}
    by_word = {"full_shard": "full", "shard_grad_op": "full", "no_shard": "none"}
    by_word |= {"hybrid_shard": "hybrid", "hybrid_shard_zero2": "hybrid"}
    words = set(value.replace(",", " ").split()) if isinstance(value, str) else set(value or ())
    if wrong := words - by_word.keys() - {"offload", "auto_wrap"}:
        raise given.refused(f"{sorted(wrong)[0]} is not one of {', '.join((*by_word, 'offload', 'auto_wrap'))}")
    sharding = next((by_word[word] for word in words if word in by_word), None)
    return {**(given.to(sharding) if sharding else {}), **({"parallel.offload": True} if "offload" in words else {})}


def fsdp_size(given: Given) -> Options:
    """The devices that together hold one copy; verl's -1 is all devices."""
    if given.value == 1:
        return {"parallel.sharding": "none"}
    return {} if given.value in (-1, 0, None) else {"parallel.sharding": "hybrid", **given.to(given.value)}


def offload(given: Given) -> Options:
    """FSDP's offload: a switch, or the name of the target device."""
    on = given.value == "cpu" if given.value in ("cpu", "none") else given.boolean()
    return given.to(True) if on else {}


def resume(given: Given) -> Options:
    """Resume the run of the same name."""
    if isinstance(given.value, str):
        raise KeelError(f"{given.name}={given.value} names a folder: a run is resumed by keel train --resume RUN")
    return choice(given)


def optimizer_offload(given: Given) -> Options:
    """Optimizer offload; FSDP moves the moments with the weights."""
    with_weights = given.get(A + "fsdp_config.param_offload") is True
    return {"parallel.offload" if with_weights else given.target: given.value}


def datasets(given: Given) -> Options:
    """Several paths as one text."""
    value = given.value
    paths = [part.strip() for part in value.split(";") if part.strip()] if isinstance(value, str) else value
    return given.to(paths[0] if isinstance(paths, list) and len(paths) == 1 else paths)


def dataset_name(given: Given) -> Options:
    """A data set of the hub, with its configuration."""
    part = given.get("dataset_config")
    return given.to(given.value if part is None else f"{given.value},{part}")


def dataset_config(given: Given) -> Options:
    """The configuration of a data set, which is converted with its name."""
    if given.value is not None and given.get("dataset_name") is None:
        raise KeelError(f"dataset_config={given.value} needs a dataset_name: set data.path=NAME,{given.value}")
    return {}


def cut_left(given: Given) -> Options:
    """TRL truncates long prompts on the left."""
    return {**given.to(given.value), **({} if "data.truncation" in given.settings else {"data.truncation": "left"})}


def custom_reward(given: Given) -> Options:
    """verl's reward function has another signature than Keel's, so it must be wrapped."""
    path = given.get("custom_reward_function.path")
    name = given.settings.get("custom_reward_function.name", "compute_score")
    if path is None:
        return {}
    module = str(path).rpartition("/")[2].removesuffix(".py")
    raise KeelError(
        f"verl calls {name}(data_source, solution_str, ground_truth, extra_info), Keel reward(problem, text): wrap it "
        f"and name it by hand, rewards: [{{name: {module}:reward}}]"
    )


def output_dir(given: Given) -> Options:
    """A run's folder; its last component is the run's name, unless that is given."""
    path = PurePath(str(given.value))
    if given.first("run_name", "run.name", "exp_name"):
        return given.to(str(path))
    return {**given.to(str(path.parent)), "run.name": path.name or "default"}


def loggers(given: Given) -> Options:
    """A logger's name, or a list of them."""
    named = {given.value} if isinstance(given.value, str) else set(given.value or ())
    if unknown := named.difference(given.values):
        raise KeelError(f"{given.name}={sorted(unknown)[0]} has no counterpart: known: {', '.join(given.values)}")
    project = given.first("trainer.project_name", default="keel")
    wandb = {"log.wandb": {"project": project}} if named & {"wandb", "all"} else {}
    return {"log.tensorboard": bool(named & {"tensorboard", "all"}), **wandb}
