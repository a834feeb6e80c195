"""The bridge's settings: checks, the choice of β, notes, and TRL's options under Keel's names."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from keel.base.errors import KeelError
from keel.base.options import Options
from keel.config import Config, peers, read_config
from keel.config.load import is_option, set_option, validate
from keel.kl import BetaController, KLOptions, Pairing, advise, check_kl, controller_from_options
from keel.kl.facts import POLICY_REF
from keel.losses.options import MismatchOptions
from keel.models.dropout import module_dropouts
from keel.reference.base import is_server
from keel.reference.kinds import check_reference
from keel.reference.options import ReferenceOptions
from keel.run.resume import may_change
from keel.trainer.options import GuardOptions
from keel.verify.custom import estimator_facts

# The reduction of each TRL loss, by its name in `keel.losses.reductions`. luspo sums each completion's tokens, so its
# constant is 1 instead of the longest completion.
REDUCTIONS = {
    **dict.fromkeys(("grpo", "sapo"), "sequence_mean"),
    **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token_mean"),
    **dict.fromkeys(("dr_grpo", "luspo"), "constant"),
}
# Options of GRPOConfig that config.yaml shows, under Keel's names if there is one.
SHOWN = (
    *("loss_type", "epsilon", "epsilon_high", "delta", "num_iterations", "importance_sampling_level", "scale_rewards"),
    *("mask_truncated_completions", "entropy_coef", "num_generations", "temperature", "top_p", "top_k", "min_p"),
    *("max_completion_length", "per_device_train_batch_size", "generation_batch_size", "steps_per_generation"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "save_steps"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "gradient_checkpointing"),
)


@dataclass(frozen=True)
class TrlSettings:
    """Keel's options, checked against TRL's options."""

    kl: KLOptions
    guards: GuardOptions
    reference: ReferenceOptions

    @property
    def kept(self) -> dict[str, Any]:
        """The options that must not change on resume, by dotted name."""
        sections = {"kl": self.kl, "reference": self.reference}
        named = {
            f"{section}.{name}": value
            for section, options in sections.items()
            for name, value in options.model_dump(mode="json").items()
        }
        return {name: value for name, value in named.items() if not may_change(name)}


def check_args(args: Any) -> None:
    """Refuse options that the bridge does not support, before a model is loaded."""
    from trl import GRPOConfig

    if not isinstance(args, GRPOConfig):
        raise KeelError(
            f"args is a {type(args).__name__}, but KeelGRPOTrainer supports GRPOTrainer only (AsyncGRPO has another "
            "loop): give a trl.GRPOConfig"
        )
    if args.deepspeed or _launched_with("DEEPSPEED"):
        raise KeelError(
            "Keel cannot skip updates under DeepSpeed, which keeps the gradients itself: use DDP (accelerate or "
            "torchrun), or train with keel train and parallel.sharding=full"
        )
    if args.fsdp or _launched_with("FSDP"):
        raise KeelError(
            "FSDP under TRL was not tested with Keel's references: launch with DDP, or train with keel train and "
            "parallel.sharding=full"
        )
    if args.mixed_precision == "fp16":
        raise KeelError(
            "fp16 is not supported inside TRL: its scaler also skips updates, which Keel would count as non-finite; "
            "set bf16=True, or train in fp32 with bf16=False"
        )
    if any(part in str(_plain(args.optim)) for part in ("lomo", "layerwise")):
        raise KeelError(
            f"optim={_plain(args.optim)} updates during the backward pass, so Keel cannot skip an update: use another"
        )
    if args.use_liger_kernel:
        raise KeelError("use_liger_kernel was not tested with Keel's KL term: set use_liger_kernel=False")
    if args.sync_ref_model:
        raise KeelError(
            "sync_ref_model is TRL's moving reference: set it to False and give "
            "reference=ReferenceOptions(kind='ema', alpha=…, every=…), which works with LoRA too"
        )


def _launched_with(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes")


T = TypeVar("T", bound=Options)


def _section(name: str, kind: type[T], value: T | Mapping[str, Any] | None) -> T:
    """A section of options, given as an object or a mapping."""
    if isinstance(value, kind):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise KeelError(f"{name} is a {type(value).__name__}: give a {kind.__name__}, or its options as a mapping")
    validate({name: value or {}})  # raises an error of one line with the dotted name
    return kind.model_validate(value or {})


def settle(
    beta: float,
    kl: KLOptions | Mapping[str, Any] | None,
    guards: GuardOptions | Mapping[str, Any] | None,
    reference: ReferenceOptions | Mapping[str, Any] | None,
) -> TrlSettings:
    """Keel's options. β defaults to `GRPOConfig.beta`. Raises for options that cannot work."""
    kl = _section("kl", KLOptions, kl)
    guards, reference = _section("guards", GuardOptions, guards), _section("reference", ReferenceOptions, reference)
    if "beta" not in kl.model_fields_set:
        if beta == 0:
            raise KeelError(
                "β is 0 in GRPOConfig, and kl does not set it: set kl=KLOptions(beta=…), or KLOptions(beta=0.0) to "
                "start without a penalty"
            )
        kl = kl.model_copy(update={"beta": beta})
    elif beta not in (0, kl.beta):
        raise KeelError(f"GRPOConfig sets beta={beta:g}, but kl.beta is {kl.beta:g}: keep one")
    if not kl.penalizes and kl.measure_every == 0:
        raise KeelError(
            "kl.beta is 0 and kl.measure_every is 0, so Keel neither penalizes nor measures: set kl.measure_every=1"
        )
    check_kl(kl, estimator_facts(kl.estimator))
    check_reference(reference.kind, **reference.params)
    _check_done_here(kl, reference)
    return TrlSettings(kl, _guards(guards), reference)


def _check_done_here(kl: KLOptions, reference: ReferenceOptions) -> None:
    """Refuse options that only Keel's own trainer supports."""
    if kl.placement == "reward":
        raise KeelError(
            "kl.placement=reward is not supported inside TRL, whose rewards Keel cannot change: use "
            "kl.placement=advantage, which applies the penalty after the division by the group's standard deviation"
        )
    if kl.teacher is not None:
        raise KeelError(
            "kl.teacher is not supported inside TRL, which has one reference: name the teacher in reference.model, or "
            "train with keel train"
        )
    teacher = reference.params.get("model")
    if isinstance(teacher, Mapping):
        raise KeelError(
            "reference.model with a teacher per task is not supported inside TRL: name one teacher for all tasks"
        )
    if teacher is not None and is_server(teacher):
        raise KeelError(
            "reference.model as a server is not supported inside TRL: name a model, or train with keel train"
        )
    if reference.params.get("device", "auto") != "auto":
        raise KeelError("reference.device is not supported inside TRL, which places models itself: leave it out")
    if kl.collect_max is not None:
        raise KeelError("kl.collect_max is not supported inside TRL: leave it out, or train with keel train")
    if kl.budget is not None and kl.budget.action == "rollback":
        raise KeelError("kl.budget.action=rollback is not supported inside TRL: use stop or warn")
    if kl.measure_every == 0 and reference.kind == "kl_triggered":
        raise KeelError("reference.kind=kl_triggered needs the measured KL, but kl.measure_every is 0: set it to 1")


def _guards(guards: GuardOptions) -> GuardOptions:
    """The guards. Runs inside TRL cannot roll back, so `on_nans` defaults to stop."""
    for name in sorted({"max_rollbacks", "recovery_lr_factor"} & guards.model_fields_set):
        raise KeelError(f"guards.{name} is about rollbacks, which are not supported inside TRL: leave it out")
    if "on_nans" not in guards.model_fields_set:
        return guards.model_copy(update={"on_nans": "stop"})
    if guards.on_nans == "rollback":
        raise KeelError("guards.on_nans=rollback is not supported inside TRL: use stop or warn")
    return guards


def several_updates(args: Any) -> bool:
    """Whether a batch of rollouts is used for several updates, by TRL's rule in `_generate_and_score_completions`."""
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0)


def pairing_of(kl: KLOptions, args: Any) -> Pairing:
    """The checked pairing under TRL's loss."""
    if args.loss_type not in REDUCTIONS:
        raise KeelError(f"Keel does not support loss_type={args.loss_type}: use one of {', '.join(REDUCTIONS)}")
    return kl.pairing(REDUCTIONS[args.loss_type], off_policy=several_updates(args), facts=estimator_facts(kl.estimator))


def controller(kl: KLOptions, args: Any) -> BetaController:
    """The controller of β. Its step is TRL's step, which is one update."""
    return controller_from_options(
        kl, args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    )


def mismatch_of(args: Any) -> MismatchOptions:
    """TRL's correction of the mismatch between vLLM and the model, as Keel options."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return MismatchOptions(kind="none")
    level = args.vllm_importance_sampling_mode.partition("_")[0]
    cap = args.vllm_importance_sampling_clip_max
    return MismatchOptions(kind="truncate", level=level, cap=1e6 if cap is None else max(1.0, cap))


def config_of(args: Any, settings: TrlSettings | None, **own: Any) -> tuple[Config, list[str]]:
    """A Keel configuration from TRL's options, and a sentence on each option without a counterpart.

    `own` are further options of the caller, by dotted name with `__` instead of the dot.
    """
    given = {name: getattr(args, name, None) for name in SHOWN}
    if given["generation_batch_size"] is not None:  # TRL computes one of the two options from the other
        given["steps_per_generation"] = None
    given["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    named = peers.by_name({name: _plain(value) for name, value in given.items() if value is not None}, is_option)
    options: dict[str, Any] = {name.replace("__", "."): value for name, value in own.items()}
    if settings is not None:
        options |= {f"kl.{name}": value for name, value in settings.kl.model_dump().items()}
        options |= {f"guards.{name}": value for name, value in settings.guards.model_dump().items()}
        options |= {f"reference.{name}": value for name, value in settings.reference.model_dump().items()}
    else:
        options |= {"kl.beta": args.beta, "kl.reduction": "loss"}
        options["kl.gradient"] = "rho" if args.use_bias_correction_kl else "plain"
    groups, notes = [("", options)], []
    for name, value in named.items():
        alias = peers.find(name, is_option)
        try:
            groups.append((f"{name}={value}: ", {} if alias is None else dict(alias.apply(value, named))))
        except KeelError as error:
            notes.append(f"{error}; config.yaml leaves it out")
    tree, refused = _accepted({}, groups)
    return read_config(tree, installed=False)[0], notes + refused


def _accepted(tree: dict[str, Any], groups: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[str]]:
    """Add the groups of options that Keel accepts to the tree; also return why the others are left out.

    All groups are tried together, then each half, because checking a configuration is slow and few are refused.
    """
    changed = copy.deepcopy(tree)
    for _, options in groups:
        for name, value in options.items():
            set_option(changed, name, value)
    try:
        read_config(changed, installed=False)
    except KeelError as error:
        if len(groups) == 1:
            return tree, [f"{groups[0][0]}{error}; config.yaml leaves it out"]
        half = len(groups) // 2
        tree, before = _accepted(tree, groups[:half])
        tree, after = _accepted(tree, groups[half:])
        return tree, before + after
    return changed, []


def _plain(value: Any) -> Any:
    """The value of an enumeration member; other objects unchanged."""
    return getattr(value, "value", value)


# Keys of generation_kwargs that change the sampling distribution.
SHAPING = (
    *("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "do_sample"),
    *("num_beams", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias"),
    *("bad_words_ids", "bad_words", "suppress_tokens", "sequence_bias", "min_new_tokens", "min_length", "min_tokens"),
)


def notes_on(kl: KLOptions, pairing: Pairing, args: Any) -> list[str]:
    """Notes on allowed options with unexpected effects, one sentence each."""
    notes = [pairing.note] if kl.penalizes and pairing.expected_gradient != POLICY_REF else []
    if kl.penalizes and kl.placement == "loss" and args.importance_sampling_level == "sequence":
        notes.append(
            "importance_sampling_level=sequence applies to the policy term only: the KL term is weighted by the "
            "token's ratio, TRL's own KL term by the sequence's"
        )
    if args.mask_truncated_completions:
        notes.append(
            "mask_truncated_completions also removes truncated completions from the KL term and its measurement, as in "
            "TRL; in keel train, loss.mask_truncated_completions keeps their KL penalty"
        )
    return notes + advise(args.loss_type, kl.beta) + _sampling_notes(args)


def _sampling_notes(args: Any) -> list[str]:
    """Notes on options that change the sampling distribution where no log-probabilities can correct for it."""
    given = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    notes = []
    if not args.use_vllm and (args.top_p < 1 or args.top_k or args.min_p):
        notes.append(
            "top_p, top_k or min_p truncate the sampled distribution, and transformers' generation does not report "
            "the removed probability. The KL estimate is therefore biased, and so are the KL penalty and the "
            "comparison with the KL budget: use top_p=1.0, top_k=0 and min_p=0.0 in training"
        )
    if args.repetition_penalty != 1:
        notes.append(
            f"repetition_penalty={args.repetition_penalty:g} changes the sampling distribution, but the KL is computed "
            "for the policy's own: use 1.0 in training"
        )
    if shaping := [name for name in given if name in SHAPING]:
        notes.append(
            f"generation_kwargs has {', '.join(shaping)}, which changes the sampling distribution, but the KL is "
            "computed for the policy's own"
        )
    return notes


def dropout_notes(settings: TrlSettings, model: nn.Module) -> list[str]:
    """A note on dropout. Dropout is refused if decisions depend on the measured KL, because it adds noise to the KL."""
    active = [f"{path}.{key}={value:g}" for path, _, key, value in module_dropouts(model) if value > 0]
    if not active:
        return []
    where = active[0]
    kl = settings.kl
    deciding = {
        "kl.budget": kl.budget is not None,
        f"kl.controller.name={kl.controller.name}": kl.adapts_beta,
        "reference.kind=kl_triggered": settings.reference.kind == "kl_triggered",
    }
    for option, decides in deciding.items():
        if decides:
            raise KeelError(
                f"{option} depends on the measured KL, to which dropout ({where}) adds noise: set disable_dropout=True "
                "in GRPOConfig, and the dropouts of the model's configuration to 0"
            )
    return [f"dropout is on ({where}): policy and reference differ from the first step, so the KL does not start at 0"]
