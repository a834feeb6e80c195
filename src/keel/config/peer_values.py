"""A given option of a peer: its value, the conditions under which the peer reads it, and most conversions of it.

`peer_conversions` has those of KL terms and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

from keel.base import yaml_text as text
from keel.base.errors import KeelError, did_you_mean
from keel.base.yaml_text import load_package_yaml

Settings = Mapping[str, Any]  # all given settings by name
Options = Mapping[str, Any]  # Keel options by dotted name
Convert = Callable[["Given"], Options]
A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
IN_LOSS, IN_REWARD, LORA_RANK = A + "use_kl_loss", "algorithm.use_kl_in_reward", M + "lora_rank"
BETA = ("kl.beta", "beta", "kl_beta", "kl_coef", "kl_penalty", "init_kl_coef")
# Names that only OpenRLHF has: if one of them is given, shared names have OpenRLHF's meaning.
OWN = frozenset(
    {"n_samples_per_prompt", "init_kl_coef", "generate_max_len", "prompt_max_len", "pretrain", "prompt_data"}
    | {"actor_learning_rate", "micro_rollout_batch_size", "micro_train_batch_size", "eps_clip"}
)
ESTIMATOR, CORRECTION = "algorithm.adv_estimator", "vllm_importance_sampling_correction"
V = "rollout.vllm."
D = "distillation.distillation_loss."
DISTILS = "distillation.enabled"


@cache
def data() -> Mapping[str, Any]:
    """The contents of peers.yaml."""
    return load_package_yaml("keel.config", "peers.yaml")


def full(peer: str, name: str) -> str:
    """The peer's full name of a name in the table."""
    section, _, rest = name.partition(".")
    if peer == "verl" and section in ("actor", "rollout", "model", "ref", "hybrid_engine"):
        return f"actor_rollout_ref.{name}"
    long = {"distill": D, "teacher": "distillation.teacher_models.teacher_model."} if peer == "verl" else {}
    return f"{long[section]}{rest}" if section in long else name


@dataclass(frozen=True)
class Given:
    """A given option: its name and row in the table, its value, and all other settings."""

    name: str
    target: str
    reason: str
    values: Any
    value: Any
    settings: Settings

    def to(self, value: Any) -> Options:
        """The row's option with this value."""
        return {self.target: value}

    def get(self, name: str) -> Any:
        """Another setting, or None."""
        return self.settings.get(name)

    def first(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that is not null."""
        return next((self.settings[name] for name in names if self.settings.get(name) is not None), default)

    def count(self, name: str, default: int) -> int:
        """A setting that must be a positive integer."""
        return whole(name, self.first(name, default=default))

    def boolean(self) -> bool:
        """The value, which must be a boolean: the string "False" would be truthy."""
        if not isinstance(self.value, bool):
            raise KeelError(f"{self.name} is {text.dump(self.value)}: expected true or false")
        return self.value

    def refused(self, reason: str) -> KeelError:
        """The error for a value without a counterpart."""
        return KeelError(f"{self.name}={text.dump(self.value)} has no counterpart: {reason}")

    @property
    def samples(self) -> bool:
        """Whether vLLM may be the engine: no switch selects another one."""
        has_engines = self.settings.get("vllm_num_engines", 1) not in (0, None)
        return has_engines and self.get("use_vllm") is not False and self.settings.get(R + "name", "vllm") == "vllm"

    @property
    def has_server(self) -> bool:
        """Whether vLLM runs as a server."""
        return self.first("vllm_mode", V + "mode", default="colocate") == "server"

    @property
    def is_openrlhf(self) -> bool:
        """Whether the settings contain a name that only OpenRLHF has."""
        return not OWN.isdisjoint(self.settings)


def number(name: str, value: Any, reason: str) -> float:
    """The value, which must be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KeelError(f"{name} is {value!r}: {reason}")
    return value


def whole(name: str, value: Any) -> int:
    """The value, which must be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise KeelError(f"{name} is {text.dump(value)}: give a whole number, at least 1")
    return int(value)


def group_size(settings: Settings, default: int = 8) -> int:
    """Completions per problem, under any trainer's name for them, or `default`."""
    names = data()["same"]["rollout.num_generations"]
    known = [full(peer, name) for peer, shared in names.items() for name in shared.split()]
    given = next((name for name in ("rollout.num_generations", *known) if settings.get(name) is not None), None)
    return default if given is None else whole(given, settings[given])


def is_positive(given: Given) -> bool:
    return isinstance(given.value, int) and given.value > 0


def _is_adaptive(given: Given) -> bool:
    return given.get("algorithm.kl_ctrl.type") == "adaptive" and given.get(IN_REWARD) is not False


def _has_adapter(given: Given) -> bool:
    return all(given.get(name) is not False for name in ("use_peft", "use_lora")) and given.get(LORA_RANK) != 0


def _is_rewarded(given: Given) -> bool:
    return given.get(DISTILS) is not True or given.get(D + "use_task_rewards") is not False


IN_PROCESS = "read if vLLM samples in the trainer's process; for a server, use the flags of keel serve"
# Conditions under which the other trainer reads an option: a test, and the default note.
CONDITIONS: Mapping[str, tuple[Callable[[Given], bool], str]] = {
    "given": (lambda given: given.value is not None, "null keeps Keel's default"),
    "not_zero": (lambda given: bool(given.value), ""),
    "positive": (is_positive, ""),
    "elsewhere": (lambda given: False, ""),  # set by the conversion of another option
    "in_loss": (lambda given: given.get(IN_LOSS) is not False, "read if use_kl_loss is true"),
    "in_reward": (lambda given: given.get(IN_REWARD) is not False, "read if use_kl_in_reward is true"),
    "adaptive": (_is_adaptive, "read if algorithm.kl_ctrl.type is adaptive"),
    "distilling": (lambda given: given.get(DISTILS) is True, f"read if {DISTILS} is true"),
    "rewarded": (_is_rewarded, ""),
    "synced": (lambda given: given.get("sync_ref_model") is not False, ""),
    "adapter": (_has_adapter, "read unless use_peft or use_lora is false or lora_rank 0"),
    "ranked": (lambda given: bool(given.get(LORA_RANK)), "read if lora_rank is above 0"),
    "sampling": (lambda given: given.samples, ""),
    "corrected": (lambda given: given.samples and given.get(CORRECTION) is not False, ""),
    "in_process": (lambda given: given.samples and not given.has_server, IN_PROCESS),
    "at_server": (
        lambda given: given.samples and given.has_server,
        "read with vllm_mode=server; use keel serve as the server",
    ),
}


def choice(given: Given) -> Options:
    """The options for a value listed in the row."""
    values = given.values if isinstance(given.values, Mapping) else {value: value for value in given.values}
    key = given.value if isinstance(given.value, bool) else str(given.value)
    if key in values:
        return values[key] if isinstance(values[key], Mapping) else given.to(values[key])
    if all(isinstance(known, bool) for known in values):
        given.boolean()
    known = [str(option) for option in values]
    raise given.refused(f"{did_you_mean(given.value, known, 0.6)}known: {', '.join(known)}")


def needless(given: Given) -> Options:
    """Return no option, because Keel always behaves like the row's values; refuse other values."""
    fits = [(isinstance(value, bool), value) for value in given.values]
    if fits and (isinstance(given.value, bool), given.value) not in fits:
        raise given.refused(given.reason)
    return {}


def refuse(given: Given) -> Options:
    """Refuse an option whose name has another meaning in Keel; the row's advice may contain {value}."""
    raise given.refused(given.reason.replace("{value}", text.dump(given.value)))


# ------------------------------------------------------------ engines, sharding, data, loggers, folders


def one_gpu(given: Given) -> Options:
    """The number of GPUs per sampler; vLLM in the trainer's process uses 1."""
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
    at = "127.0.0.1" if host == "0.0.0.0" else host  # clients cannot connect to 0.0.0.0, a listening address
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
    """The number of devices that hold one copy of the weights; verl's -1 is all devices."""
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
        raise KeelError(f"{given.name}={given.value} names a folder: to resume a run, use keel train --resume RUN")
    return choice(given)


def optimizer_offload(given: Given) -> Options:
    """Optimizer offload; FSDP moves the moments with the weights."""
    with_weights = given.get(A + "fsdp_config.param_offload") is True
    return {"parallel.offload" if with_weights else given.target: given.value}


def datasets(given: Given) -> Options:
    """A path, a list of paths, or paths in one string, separated by semicolons."""
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
        f"verl calls {name}(data_source, solution_str, ground_truth, extra_info), and Keel calls reward(problem, "
        f"text): wrap your function and set rewards: [{{name: {module}:reward}}] by hand"
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
