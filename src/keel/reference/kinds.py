"""The kinds of reference by name: which weights, and when they move; or a user's `module:attr`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from keel.base.errors import KeelError, unknown
from keel.base.json_http import shown
from keel.base.parts import Range, import_object, is_import_path, make_part, part_arguments
from keel.models.options import LoadedModel
from keel.reference.base import Reference, RuleReference, When, is_server, packs_rows, shortest_context

if TYPE_CHECKING:
    from torch import nn

    from keel.reference.weights import ReferenceWeights


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Alpha = Annotated[float, Range("a number in (0, 1]", lambda value: _number(value) and 0 < value <= 1)]
Steps = Annotated[
    int, Range("a whole number of steps, at least 1", lambda v: _number(v) and isinstance(v, int) and v >= 1)
]
Nats = Annotated[float, Range("a positive number of nats per token", lambda value: _number(value) and value > 0)]
Seconds = Annotated[float, Range("a positive number of seconds", lambda value: _number(value) and value > 0)]
Template = Literal["same", "student"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Flag = Annotated[bool, Range("true or false", lambda value: isinstance(value, bool))]


def frozen(loaded: LoadedModel, *, offload: Flag = False) -> Reference:
    """A frozen copy of the initial policy. Under LoRA, the base is shared and only the starting adapter is copied.

    With `reference.model` the reference is a teacher instead.
    """
    return RuleReference("frozen", _weights(loaded, offload), when=_never, move=_assign)


def teacher(
    loaded: LoadedModel,
    section: str,
    model: str,
    *,
    offload: Flag = False,
    dtype: Dtype = "auto",
    device: str = "auto",
    quantization: Literal["4bit", "8bit"] | None = None,
    trust_remote_code: Flag = False,
    chat_template: Template = "same",
) -> RuleReference:
    """The model named by `model`, frozen. Its options are in `section`.

    It has the policy's dtype and device unless `dtype` and `device` name others; `quantization` needs bitsandbytes. Its
    chat template must equal the policy's, unless `chat_template` is `student`: it then reads prompts as the policy's
    template renders them. A teacher that is the policy's base under LoRA needs no second copy.
    """
    from keel.reference.adapter import base_of
    from keel.reference.teacher import TeacherWeights, load_teacher

    if (dtype, device, quantization) == ("auto", "auto", None) and (base := base_of(loaded, model)) is not None:
        if offload:
            raise KeelError(f"{section}.offload has no effect with the policy's own base as teacher: leave it out")
        return RuleReference("frozen", base, when=_never, move=_assign, teacher=model)
    if offload and quantization is not None:
        raise KeelError(f"{section}.offload cannot move quantized weights: leave it or {section}.quantization out")
    other = load_teacher(
        loaded,
        model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
        section=section,
    )
    own, policy_device = (next(each.model.parameters()).device for each in (other, loaded))
    elsewhere = None if own == policy_device else own
    return RuleReference(
        "frozen",
        TeacherWeights(other, elsewhere=elsewhere, offload=offload),
        when=_never,
        move=_assign,
        teacher=model,
        shared_prefix=other.shared_prefix,
        context_length=other.context_length,
        device=elsewhere,
    )


def server_teacher(
    loaded: LoadedModel,
    section: str,
    model: str,
    *,
    served_model_name: str | None = None,
    chat_template: Template = "same",
    headers: dict[str, str] | None = None,
    timeout_s: Seconds = 120.0,
    concurrency: Steps = 16,
) -> RuleReference:
    """A teacher behind an OpenAI-compatible server whose completions have vLLM's `prompt_logprobs`.

    `model` is its URL, such as http://host:8000/v1. `served_model_name` is one of its models, by default the first.
    `headers` may contain environment variables, such as {Authorization: Bearer $KEY}. A server's chat template cannot
    be read, so `chat_template` must be `student` if the policy has one.
    """
    from keel.reference.server import ServerTeacher
    from keel.reference.teacher import template_of

    if chat_template == "same" and template_of(loaded) is not None:
        raise KeelError(
            f"{section}.model={shown(model)} is a server, whose chat template cannot be read: set "
            f"{section}.chat_template=student if the teacher was trained on that of {loaded.name}"
        )
    server = ServerTeacher(
        loaded,
        model,
        option=f"{section}.model",
        served_model_name=served_model_name,
        headers=headers,
        timeout_s=timeout_s,
        concurrency=concurrency,
    )
    return RuleReference(
        "frozen",
        server,
        when=_never,
        move=_assign,
        teacher=str(server),
        server=server,
        context_length=server.context_length,
    )


def teachers(
    loaded: LoadedModel, section: str, models: Mapping[str, str], load: Callable[[str], RuleReference]
) -> RuleReference:
    """One teacher per task. A model that is the teacher of several tasks is loaded once."""
    from keel.reference.teacher import TaskTeachers

    by_name = {name: load(name) for name in dict.fromkeys(models.values())}
    by_task = {task: by_name[name] for task, name in models.items()}
    return RuleReference(
        "frozen",
        TaskTeachers(by_task),
        when=_never,
        move=_assign,
        teacher=", ".join(f"{each.teacher} for {task}" for task, each in by_task.items()),
        shared_prefix=packs_rows(*by_name.values()),
        context_length=shortest_context(None, *by_name.values()),
        by_task=by_task,
    )


def adapter_off(loaded: LoadedModel, *, offload: Flag = False) -> Reference:
    """The policy's base with the adapters off, or with a frozen copy of the initial adapter if that is not zero.

    The reference equals the initial policy, so the KL starts at 0. It is the base model only for a fresh adapter;
    otherwise the run logs a note. For a fresh adapter it takes no memory, so `offload` has no effect.
    """
    from keel.reference.adapter import has_adapter

    if not has_adapter(loaded.model):
        raise KeelError("reference.kind=adapter_off needs LoRA: set model.lora, or use reference.kind=frozen")
    return RuleReference("adapter_off", _weights(loaded, offload), when=_never, move=_assign)


def ema(loaded: LoadedModel, *, alpha: Alpha = 0.6, every: Steps = 512, offload: Flag = False) -> Reference:
    """Every `every` steps: reference ← α policy + (1 − α) reference, of effective weights (under LoRA: of BA).

    The same α and period as TRL's `ref_model_mixup_alpha` and `ref_model_sync_steps` (TR-DPO, arXiv:2404.09656).
    """
    from keel.reference.adapter import averaged

    average = averaged(loaded.model, offload)
    return RuleReference("ema", average, when=_every(every), move=lambda weights, policy: weights.blend(policy, alpha))


def snapshot(
    loaded: LoadedModel, *, every: Steps = 100, reset_optimizer: Flag = False, offload: Flag = False
) -> Reference:
    """Every `every` steps the reference becomes the policy, optionally with a fresh optimizer (arXiv:2505.24864)."""
    weights = _weights(loaded, offload)
    return RuleReference("snapshot", weights, when=_every(every), move=_assign, reset_optimizer=reset_optimizer)


def kl_triggered(
    loaded: LoadedModel, *, threshold: Nats = 0.1, reset_optimizer: Flag = False, offload: Flag = False
) -> Reference:
    """The reference becomes the policy whenever the measured KL (nats per token) passes `threshold`."""
    weights = _weights(loaded, offload)
    return RuleReference("kl_triggered", weights, when=_above(threshold), move=_assign, reset_optimizer=reset_optimizer)


def _weights(loaded: LoadedModel, offload: bool) -> ReferenceWeights:
    from keel.reference.adapter import (
        copied,  # imported here, as in the kinds above, because checks of options must not import torch
    )

    return copied(loaded.model, offload)


def _assign(weights: ReferenceWeights, policy: nn.Module) -> None:
    weights.assign(policy)


def _never(step: int, measured_kl: float | None) -> bool:
    return False


def _every(every: int) -> When:
    return lambda step, measured_kl: step > 0 and step % every == 0


def _above(threshold: float) -> When:
    # A step whose KL is missing or not finite does not trigger an update.
    return lambda step, kl: kl is not None and math.isfinite(kl) and kl > threshold


KINDS: Mapping[str, Callable[..., Reference]] = MappingProxyType(
    {
        "frozen": frozen,
        "adapter_off": adapter_off,
        "ema": ema,
        "snapshot": snapshot,
        "kl_triggered": kl_triggered,
    }
)


TEACHERS: Mapping[str, Callable[..., RuleReference]] = MappingProxyType(
    {"a model": teacher, "a server": server_teacher}
)


def build_reference(kind: str, loaded: LoadedModel, **params: Any) -> Reference:
    """The reference called `kind`, or a user's `module:attr`; `auto` is adapter_off for LoRA, frozen for full weights.

    With the parameter `model`, auto and frozen build a teacher.
    """
    if _is_teacher(kind, params):
        return build_teacher("reference", loaded, **params)
    if kind == "auto":
        from keel.reference.adapter import has_adapter

        kind = "adapter_off" if has_adapter(loaded.model) else "frozen"
    reference = make_part(f"reference.kind={kind}", get_reference(kind), loaded, **_arguments(kind, params))
    if not isinstance(reference, Reference):
        raise KeelError(
            f"reference.kind={kind} returned a {type(reference).__name__}: it must have the members of "
            "keel.reference.Reference"
        )
    return reference


def build_teacher(section: str, loaded: LoadedModel, model: str | Mapping[str, str], **params: Any) -> Reference:
    """Build the teacher that a section names, or one for each task, with the section's parameters."""
    factory, given = _teacher_kind(section, model), check_teacher(section, model, **params)
    load = partial(factory, loaded, section, **given)
    return load(model) if isinstance(model, str) else teachers(loaded, section, model, load)


def check_teacher(section: str, model: str | Mapping[str, str], **params: Any) -> dict[str, Any]:
    """Check a teacher's parameters before any model is loaded."""
    names = [model] if isinstance(model, str) else model
    if not names or not all(isinstance(name, str) and name for name in (*names, *_names(model))):
        raise KeelError(f"{section}.model is {model!r}: give the name of a model, or one for each task")
    return part_arguments("teacher", _teacher_kind(section, model), params, section=section, positional=3)


def _names(model: str | Mapping[str, str]) -> tuple[str, ...]:
    return (model,) if isinstance(model, str) else tuple(model.values())


def _teacher_kind(section: str, model: str | Mapping[str, str]) -> Callable[..., RuleReference]:
    servers = [is_server(name) for name in _names(model)]
    if any(servers) and not all(servers):
        raise KeelError(
            f"{section}.model has servers for some tasks and models for others: use servers for all tasks, or for none"
        )
    return server_teacher if any(servers) else teacher


def _is_teacher(kind: str, params: Mapping[str, Any]) -> bool:
    """Whether the reference is another model. A parameter of a teacher without a model is refused."""
    if kind not in ("auto", "frozen"):
        return False
    if params.get("model") is not None:
        return True
    of_teachers = {name for factory in TEACHERS.values() for name in inspect.signature(factory).parameters}
    for name in params:
        if name in of_teachers - {"offload", "model"}:
            raise KeelError(
                f"reference.{name} applies only with reference.model: set reference.model, or leave "
                f"reference.{name} out"
            )
    return False


def check_reference(kind: str, **params: Any) -> None:
    """Check the name and its parameters before any model is loaded."""
    if _is_teacher(kind, params):
        check_teacher("reference", **params)
    else:
        _arguments("frozen" if kind == "auto" else kind, params)


def _arguments(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in params.items() if (name, value) != ("model", None)}
    factory = get_reference(kind)
    return part_arguments(f"reference {kind}", factory, given, section="reference", positional=1)


def get_reference(kind: str) -> Callable[..., Reference]:
    """The factory of the named reference, or of a user's own `module:attr`."""
    if kind in KINDS:
        return KINDS[kind]
    if is_import_path(kind):
        return import_object(kind, "reference")
    raise unknown("reference.kind", kind, [*KINDS, "auto"])
