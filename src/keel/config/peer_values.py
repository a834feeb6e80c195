"""Peers' values that peers.yaml cannot convert as data: other units, options that are one here, conditions.

TRL's steps are optimizer updates, of which one batch of rollouts may serve several; Keel counts batches. TRL raises
`global_step` once per `gradient_accumulation_steps` slices, and generates once per `steps_per_generation` ×
`num_iterations` slices (GRPOTrainer 1.16, `_prepare_inputs`). So one batch has num_iterations × minibatches updates
with minibatches = steps_per_generation / gradient_accumulation_steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

from keel.base.errors import KeelError, nearest
from keel.base.yaml_text import load_package_yaml
from keel.config import text

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


@cache
def data() -> Mapping[str, Any]:
    """The contents of peers.yaml."""
    return load_package_yaml("keel.config", "peers.yaml")


def full(peer: str, name: str) -> str:
    """The full option name of the other trainer for a name in the table."""
    short = peer == "verl" and name.partition(".")[0] in ("actor", "rollout", "model", "ref", "hybrid_engine")
    return f"actor_rollout_ref.{name}" if short else name


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
    """Completions per problem, under any of their names, or Keel's default."""
    names = data()["same"]["rollout.num_generations"]
    known = [full(peer, name) for peer, shared in names.items() for name in shared.split()]
    given = next((name for name in ("rollout.num_generations", *known) if settings.get(name) is not None), None)
    return default if given is None else whole(given, settings[given])


def _is_positive(given: Given) -> bool:
    return isinstance(given.value, int) and given.value > 0


def _is_adaptive(given: Given) -> bool:
    return given.get("algorithm.kl_ctrl.type") == "adaptive" and given.get(IN_REWARD) is not False


def _has_adapter(given: Given) -> bool:
    return all(given.get(name) is not False for name in ("use_peft", "use_lora")) and given.get(LORA_RANK) != 0


IN_PROCESS = "read where vLLM samples in the training's process; a server has its own, flags of keel serve"
# Conditions under which the other trainer reads an option: a test, and the default note.
CONDITIONS: Mapping[str, tuple[Callable[[Given], bool], str]] = {
    "given": (lambda given: given.value is not None, "null leaves Keel's"),
    "not_zero": (lambda given: bool(given.value), ""),
    "positive": (_is_positive, ""),
    "elsewhere": (lambda given: False, ""),  # by the conversion of another option
    "in_loss": (lambda given: given.get(IN_LOSS) is not False, "read while use_kl_loss is on"),
    "in_reward": (lambda given: given.get(IN_REWARD) is not False, "read while use_kl_in_reward is on"),
    "adaptive": (_is_adaptive, "read while algorithm.kl_ctrl.type is adaptive"),
    "synced": (lambda given: given.get("sync_ref_model") is not False, ""),
    "adapter": (_has_adapter, "read unless use_peft or use_lora is false or lora_rank 0"),
    "ranked": (lambda given: bool(given.get(LORA_RANK)), "read with a lora_rank"),
    "sampling": (lambda given: given.samples, ""),
    "corrected": (lambda given: given.samples and given.get(CORRECTION) is not False, ""),
    "in_process": (lambda given: given.samples and not given.has_server, IN_PROCESS),
    "at_server": (
        lambda given: given.samples and given.has_server,
        "read with vllm_mode=server; the server is one of keel serve",
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
    near = nearest(given.value, known, 0.6)
    raise given.refused(f"{f'did you mean {near}? ' if near else ''}known: {', '.join(known)}")


def needless(given: Given) -> Options:
    """No option, because Keel always behaves like the row's values; other values are refused."""
    fits = [(isinstance(value, bool), value) for value in given.values]
    if fits and (isinstance(given.value, bool), given.value) not in fits:
        raise given.refused(given.reason)
    return {}


def refuse(given: Given) -> Options:
    """Refuse a name with another meaning; the row's advice may contain {value}."""
    raise given.refused(given.reason.replace("{value}", text.dump(given.value)))


def _is_on(given: Given, coefficient: str) -> bool:
    """Whether a switch of verl's KL term is on; then it needs its coefficient, and the other switch must be off."""
    if given.get(IN_LOSS) is True and given.get(IN_REWARD) is True:
        raise KeelError(f"{IN_LOSS} and {IN_REWARD} are both true: Keel's penalty enters once, set kl.placement")
    on = given.boolean()
    if on and given.first(coefficient, *BETA) is None:
        raise KeelError(f"{given.name} is true without {coefficient}: give it or kl.beta (verl's own is 0.001)")
    return on


def use_kl_loss(given: Given) -> Options:
    """KL in the loss, with the loss's reduction."""
    if _is_on(given, A + "kl_loss_coef"):
        return {"kl.placement": "loss", "kl.reduction": "loss"}
    return {} if given.get(IN_REWARD) is True else {"kl.beta": 0.0}


def use_kl_in_reward(given: Given) -> Options:
    """KL in the reward."""
    if _is_on(given, "algorithm.kl_ctrl.kl_coef"):
        return {"kl.placement": "reward"}
    return {} if IN_LOSS in given.settings else {"kl.beta": 0.0}


def use_kl_penalty(given: Given) -> Options:
    """A switch in addition to a coefficient; Keel has only the coefficient."""
    if not given.boolean():
        return {"kl.beta": 0.0}
    beta = given.first(*BETA, A + "kl_loss_coef", *data()["same"]["kl.beta"]["other"].split())
    if not beta:
        raise KeelError(f"use_kl_penalty is true while β is {beta or 0}: set kl.beta above 0, such as kl.beta=0.01")
    return {}


def coefficient(given: Given) -> Options:
    """A number is the coefficient; in verl and TRL's PPO the name selects an estimator."""
    if str(given.value) in given.values:
        use = f"set kl.estimator={given.values[str(given.value)]}, and kl.beta above 0"
        raise KeelError(f"{given.name}={given.value} names an estimator: {use}")
    return given.to(given.value)


def kl_in_reward(given: Given) -> Options:
    """OpenRLHF's penalty is in the reward, by k1, unless use_kl_loss says otherwise."""
    if given.get(IN_LOSS) is True or not given.settings.keys() & (OWN - {"init_kl_coef"}):
        return given.to(given.value)
    estimator = {} if "kl_estimator" in given.settings else {"kl.estimator": "k1"}
    return {**given.to(given.value), "kl.placement": "reward", **estimator}


def target_kl(given: Given) -> Options:
    """A target KL needs a feedback controller; the default is PPO's step rule."""
    name = given.first("kl.controller.name", default="fixed")
    if name in ("warmup", "linear", "cosine"):
        raise KeelError(f"target_kl has no meaning with kl.controller.name={name}, which follows the step: use step")
    return {**({"kl.controller.name": "step"} if name == "fixed" else {}), **given.to(given.value)}


def kl_warmup(given: Given) -> Options:
    """Every controller warms up by `warmup_steps`, but `warmup` itself calls it `steps`."""
    warmup = given.get("kl.controller.name") == "warmup"
    return {"kl.controller.steps": given.value} if warmup else given.to(given.value)


def reference_every(given: Given) -> Options:
    """The update period of a moving reference, whose kind must be given."""
    if given.get("reference.kind") in ("ema", "snapshot"):
        return given.to(given.value)
    raise KeelError(
        f"{given.name}={text.dump(given.value)} needs a reference that follows the policy: give "
        "reference.kind=snapshot (a copy) or ema (an average) beside it"
    )


def horizon(given: Given) -> Options:
    """The horizon of the adaptive controller."""
    if given.get("kl_target") is None and given.get("kl.controller.name") != "ziegler":
        fix = "is of the adaptive controller: set kl.controller.name=ziegler beside it"
        raise KeelError(f"the horizon {given.value} {fix}")
    return given.to(given.value)


def slices(given: Given) -> tuple[int, int]:
    """(slices of a batch of rollouts, slices of an update), in micro-batches of per_device_train_batch_size."""
    accumulated = given.count("gradient_accumulation_steps", 1)
    if given.get("generation_batch_size") is not None:
        per_device = given.count("per_device_train_batch_size", 8)
        batch, remainder = divmod(given.count("generation_batch_size", 1), per_device)
        if remainder or not batch:
            raise KeelError(f"generation_batch_size is no multiple of per_device_train_batch_size={per_device}")
    else:
        batch = given.count("steps_per_generation", accumulated)
    if batch < accumulated:
        if accumulated % batch or given.count("num_iterations", 1) > 1:
            raise KeelError(
                f"gradient_accumulation_steps={accumulated} spans several generations of {batch} slices: set "
                "rollout.prompts_per_step and optim.minibatches by hand"
            )
        return accumulated, accumulated  # one update on several batches of one and the same policy
    if batch % accumulated:
        raise KeelError(
            f"a generation of {batch} slices is no multiple of gradient_accumulation_steps={accumulated}: set "
            "optim.minibatches by hand"
        )
    return batch, accumulated


def trl_minibatches(given: Given) -> Options:
    """Updates per pass over a batch."""
    batch, accumulated = slices(given)
    return {"optim.minibatches": batch // accumulated} if batch > accumulated else {}


def per_device(given: Given) -> Options:
    """TRL counts completions: per device × slices of a batch of rollouts."""
    completions = whole(given.name, given.value)
    if given.get("generation_batch_size") is not None:
        return {}  # which says it all
    (steps, _), group = slices(given), group_size(given.settings)
    prompts, remainder = divmod(completions * steps, group)
    if remainder:
        raise KeelError(
            f"{given.name}={given.value} × {steps} accumulated is {completions * steps} completions, which is no "
            f"multiple of num_generations={group}: set rollout.prompts_per_step"
        )
    return given.to(prompts)


def generation_batch(given: Given) -> Options:
    """All completions of a batch of rollouts."""
    group = group_size(given.settings)
    completions = slices(given)[0] * int(given.first("per_device_train_batch_size", default=8))
    if completions % group:
        raise KeelError(f"generation_batch_size={given.value} is no multiple of num_generations={group}")
    return {**given.to(completions // group), **trl_minibatches(given)}


def verl_minibatches(given: Given) -> Options:
    """verl sets the problems of an update, Keel the updates of a batch."""
    batch = given.first("data.train_batch_size", "rollout.prompts_per_step", default=16)
    updates, remainder = divmod(int(batch), int(number(given.name, given.value, "give a whole number")))
    if remainder or not updates:
        raise KeelError(f"{given.name}={given.value} does not divide {batch} problems a step: set optim.minibatches")
    return given.to(updates)


def rollout_batch(given: Given) -> Options:
    """OpenRLHF counts prompts, others completions."""
    if given.is_openrlhf:
        return given.to(given.value)
    batch, group = whole(given.name, given.value), group_size(given.settings)
    groups, remainder = divmod(batch, group)
    of_groups = f"in groups of {group} are rollout.prompts_per_step={groups}"
    raise KeelError(
        f"rollout_batch_size={batch} counts prompts in OpenRLHF and completions elsewhere: {batch} prompts are "
        f"rollout.prompts_per_step={batch}, {batch} completions "
        + (f"are no multiple of rollout.num_generations={group}" if remainder else of_groups)
    )


def train_batch(given: Given) -> Options:
    """OpenRLHF counts the completions of an update, verl the prompts of a step."""
    if "rollout_batch_size" not in given.settings or not given.is_openrlhf:
        raise KeelError(
            f"train_batch_size={given.value} counts prompts of a step in verl and completions of an update elsewhere: "
            "set rollout.prompts_per_step for the first, optim.minibatches (updates a step) for the second"
        )
    prompts = whole("rollout_batch_size", given.get("rollout_batch_size"))
    completions = prompts * group_size(given.settings, default=1)
    updates, remainder = divmod(completions, whole(given.name, given.value))
    if remainder or not updates:
        raise KeelError(
            f"train_batch_size={given.value} does not divide {completions} completions a step: set optim.minibatches"
        )
    return given.to(updates)


def batch_epochs(given: Given) -> Options:
    """OpenRLHF's are updates on a batch; elsewhere the name counts passes over the data."""
    if given.is_openrlhf:
        return given.to(given.value)
    raise KeelError(
        f"max_epochs={given.value} counts passes over a batch of rollouts in OpenRLHF, over the data elsewhere: set "
        f"loss.num_iterations={given.value} for the first, run.max_steps (steps) for the second"
    )


def _batches(given: Given, name: str, value: Any) -> int:
    """A number of TRL's steps, or a share of max_steps below 1, in batches."""
    steps = number(name, value, "give a number of steps")
    if 0 < steps < 1:
        total = given.first("max_steps", "run.max_steps")
        if total is None or number("max_steps", total, "give a whole number") < 1:
            raise KeelError(
                f"{name}={value:g} is a share of the steps, and max_steps is not given: give run.max_steps, or set the "
                "steps by hand"
            )
        steps = math.ceil(steps * total)
        if given.get("max_steps") is None:  # the total is in batches already
            return int(steps)
    if steps != int(steps):
        raise KeelError(f"{name} is {value}: give a whole number of steps, or a share below 1")
    batch, accumulated = slices(given)
    return math.ceil(int(steps) / (given.count("num_iterations", 1) * (batch // accumulated)))


def in_batches(given: Given) -> Options:
    """A number of steps under TRL's name."""
    return given.to(_batches(given, given.name, given.value))


def max_steps(given: Given) -> Options:
    """TRL's -1 leaves the length to num_train_epochs."""
    value = given.value
    counted = isinstance(value, int | float) and not isinstance(value, bool) and value > 1 and value == int(value)
    return in_batches(given) if counted else given.to(value)


def by_steps(given: Given) -> Options:
    """A period that TRL reads only while its strategy is `steps`."""
    strategies = ("save_strategy",) if given.name == "save_steps" else ("eval_strategy", "evaluation_strategy")
    if given.value == -1:  # OpenRLHF's never
        return given.to(0) if given.target == "eval.every" else {}
    return {} if given.value is None or given.first(*strategies, default="steps") != "steps" else in_batches(given)


def eval_strategy(given: Given) -> Options:
    """Whether TRL evaluates; YAML reads a bare `no` as false."""
    if given.value not in ("no", False, "steps"):
        raise given.refused("set eval.every by hand, in steps")
    return {} if given.value == "steps" else given.to(0)


def save_strategy(given: Given) -> Options:
    """Keel always writes the last step, so `no` is a checkpoint at the end."""
    total = given.get("max_steps")
    if given.value == "steps":
        return {}
    if given.value in ("no", False) and isinstance(total, int) and total > 0:
        return given.to(_batches(given, "max_steps", total))
    raise given.refused("set checkpoint.every by hand, in steps")


def epochs(given: Given) -> Options:
    """Read only where the steps do not say how long to train."""
    total = given.first("trainer.total_training_steps", "max_steps", "run.max_steps")
    if total is None or total == -1:
        raise given.refused("Keel counts steps, not passes over the data; set run.max_steps by hand")
    return {}


def verl_warmup(given: Given) -> Options:
    """A share of the steps, which verl reads where lr_warmup_steps is negative or not given."""
    steps = given.get(A + "optim.lr_warmup_steps")
    ratio = number(given.name, given.value, "give a share of the steps")
    if ratio == 0 or (isinstance(steps, int) and steps >= 0):
        return {}
    total = given.first("trainer.total_training_steps", "run.max_steps", "max_steps")
    if total is None:
        raise KeelError(
            f"{given.name}={given.value} is a share of the steps, and trainer.total_training_steps is not given: set "
            "optim.warmup_steps by hand"
        )
    return given.to(int(ratio * total))


def one_gpu(given: Given) -> Options:
    """GPUs of one sampler: in the training's process it is 1."""
    if (size := whole(given.name, given.value)) == 1:
        return {}
    raise given.refused(
        f"vLLM in the training's process takes one GPU; start keel serve MODEL --tensor-parallel-size {size}, and set "
        "rollout.vllm.mode=server and rollout.vllm.url by hand"
    )


def vllm_mode(given: Given) -> Options:
    """Where vLLM samples; a server takes TRL's default address where none is given."""
    mode = choice(given)
    return {**mode, **(vllm_url(given) if given.value == "server" else {})} if given.samples else {}


def vllm_url(given: Given) -> Options:
    """A server's address, of TRL's options together."""
    if V + "url" in given.settings:
        return {}
    host = given.first("vllm_server_host", default="0.0.0.0")
    at = "127.0.0.1" if host == "0.0.0.0" else host  # an address to listen on, not one to ask
    port = given.first("vllm_server_port", default=8000)
    return {V + "url": given.first("vllm_server_base_url", default=f"http://{at}:{port}")}


def mismatch_kind(given: Given) -> Options:
    """token_truncate, token_mask, sequence_truncate, sequence_mask; a mask with two limits is icepop."""
    level, _, kind = str(given.value).partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        raise given.refused("use token or sequence, truncate or mask")
    both = kind == "mask" and given.get("vllm_importance_sampling_clip_min") is not None
    return {"loss.mismatch.kind": "icepop" if both else kind, "loss.mismatch.level": level}


def mismatch_floor(given: Given) -> Options:
    """A lower limit, which masked weights alone have."""
    if str(given.get("vllm_importance_sampling_mode")).endswith("_truncate"):
        raise given.refused(
            "truncated weights have an upper limit alone, loss.mismatch.cap; masked ones have both, "
            "loss.mismatch.kind=icepop"
        )
    return given.to(given.value)


def fsdp(given: Given) -> Options:
    """transformers' `fsdp`: words such as full_shard, hybrid_shard, offload and auto_wrap; or true."""
    value = given.value
    if isinstance(value, bool):
        return given.to("full") if value else {}
    by_word = {"full_shard": "full", "shard_grad_op": "full", "no_shard": "none"}
    by_word |= {"hybrid_shard": "hybrid", "hybrid_shard_zero2": "hybrid"}
    words = set(value.replace(",", " ").split()) if isinstance(value, str) else set(value or ())
    if wrong := words - by_word.keys() - {"offload", "auto_wrap"}:
        raise given.refused(f"{sorted(wrong)[0]} is none of {', '.join((*by_word, 'offload', 'auto_wrap'))}")
    sharding = next((by_word[word] for word in words if word in by_word), None)
    return {**(given.to(sharding) if sharding else {}), **({"parallel.offload": True} if "offload" in words else {})}


def fsdp_size(given: Given) -> Options:
    """The devices that hold one copy: verl's -1 is all of them."""
    if given.value == 1:
        return {"parallel.sharding": "none"}
    return {} if given.value in (-1, 0, None) else {"parallel.sharding": "hybrid", **given.to(given.value)}


def offload(given: Given) -> Options:
    """A switch of FSDP's offload, or the name of the device that it is to."""
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
    """Several paths in one text."""
    value = given.value
    paths = [part.strip() for part in value.split(";") if part.strip()] if isinstance(value, str) else value
    return given.to(paths[0] if isinstance(paths, list) and len(paths) == 1 else paths)


def dataset_name(given: Given) -> Options:
    """A data set of the hub, with its part."""
    part = given.get("dataset_config")
    return given.to(given.value if part is None else f"{given.value},{part}")


def dataset_config(given: Given) -> Options:
    """The part of a data set, which is converted with its name."""
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
    """A run's folder; its last part is the run's name, unless that is given."""
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


def _gradient(given: Given) -> Options:
    """In the loss a peer differentiates its estimator as it stands; a + is k2's gradient under another value."""
    return {"kl.gradient": "k2" if str(given.value).endswith("+") else "plain"}


CONVERSIONS: Mapping[str, Convert] = {
    "unchanged": lambda given: given.to(given.value),
    "is_set": lambda given: given.to(bool(given.value)),
    "section": lambda given: given.to({}),
    "null_is_zero": lambda given: given.to(0.0 if given.value is None else given.value),
    "positive_or_zero": lambda given: given.to(given.value if _is_positive(given) else 0),
    "max_zero": lambda given: given.to(max(0, given.value) if isinstance(given.value, int) else given.value),
    "kl_loss_type": lambda given: {**choice(given), **({} if given.value == "full" else _gradient(given))},
    "kl_estimator": lambda given: {**choice(given), **(_gradient(given) if given.get(IN_LOSS) is True else {})},
    "norm_adv": lambda given: {} if (is_on := choice(given)) and given.get(ESTIMATOR) == "rloo" else is_on,
    "clip_low_high": lambda given: dict(zip(("loss.epsilon", "loss.epsilon_high"), given.value, strict=True)),
    "pass_at": lambda given: given.to([1] if given.value == 1 else [1, given.value]),
    "vllm_engines": lambda given: given.to("vllm" if given.value else "native"),
    "betas": lambda given: given.to([given.first("adam_beta1", default=0.9), given.first("adam_beta2", default=0.999)]),
    "truncation": lambda given: given.to("drop" if given.get("data.filter_overlong_prompts") is True else given.value),
}
