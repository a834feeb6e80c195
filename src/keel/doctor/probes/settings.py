"""What a model is run with beside its weights: settings that another family has, and an adapter of another base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ACTIVATIONS = ("silu", "gelu", "relu")
_FUNCTIONS = ("act_fn", "activation_fn", "act")  # what modules call theirs
CONVERTED = "the checkpoint was converted wrongly: what was trained for one place is loaded into another"
_OTHER = "the model is built with settings that it was not trained with: its config.json or its code is another one's"
_STRANGE = "the adapter was not trained on this base, or is read in another way than it was trained"


@dataclass(frozen=True)
class SettingChange:
    """A way to mend a model, in words, and how: applied twice the second time undoes it, or `undo` does."""

    what: str
    apply: Callable[[], None]
    undo: Callable[[], None]
    cause: str = CONVERTED
    has_to_earn: bool = False  # gold answers may be likelier by it in a model that is as it should be


def other_settings(model: nn.Module) -> Iterator[SettingChange]:
    """Other activations, heads of another width, no window, and the base without its adapter."""
    yield from _activations(model)
    yield from _heads(model)
    yield from _no_window(model)
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_B")]
    if any(bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name):
        trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

        def switch(on: bool) -> None:
            for module in adapted:
                module.enable_adapters(on)
            for parameter, own in trained:  # peft makes trainable what it switches on
                parameter.requires_grad_(own)

        yield SettingChange("the adapter switched off", lambda: switch(False), lambda: switch(True), _STRANGE, True)


def _activations(model: nn.Module) -> Iterator[SettingChange]:
    from transformers.activations import ACT2FN

    found = [(m, name, getattr(m, name)) for m in model.modules() for name in _FUNCTIONS if hasattr(m, name)]
    found = [(module, name, own) for module, name, own in found if isinstance(own, nn.Module)]
    for other in ACTIVATIONS if found else ():
        function = ACT2FN[other]
        if any(type(own) is type(function) for _, _, own in found):
            continue

        def exchange(function: nn.Module = function) -> None:
            for module, name, _ in found:
                setattr(module, name, function)

        def restore() -> None:
            for module, name, own in found:
                setattr(module, name, own)

        yield SettingChange(f"{other} for the activation", exchange, restore, _OTHER)


def _heads(model: nn.Module) -> Iterator[SettingChange]:
    """Half or twice the width of a head, where nothing else has it: the same matrices are cut into more or fewer."""
    attentions: list[Any] = [m for m in model.modules() if hasattr(m, "head_dim") and hasattr(m, "k_proj")]
    rotary: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    widths = {m.head_dim for m in attentions} | {2 * len(m.inv_freq) for m in rotary}
    if len(widths) != 1 or not rotary or any(hasattr(m, "q_norm") or not hasattr(m, "scaling") for m in attentions):
        return
    (width,) = widths
    scalings = [m.scaling for m in attentions]  # a multiplier of their own, in some families
    base = float(rotary[0].inv_freq[1]) ** (-width / 2) if width > 2 else 1e4
    frequencies = [m.inv_freq for m in rotary]
    for other in (width // 2, 2 * width):
        if other % 2 or any(m.k_proj.weight.shape[0] % other for m in attentions):
            continue

        def regroup(other: int = other) -> None:
            steps = torch.arange(0, other, 2, dtype=torch.float32, device=frequencies[0].device) / other
            for module in rotary:
                module.inv_freq = (-steps * math.log(base)).exp()
            for module, own in zip(attentions, scalings, strict=True):
                module.head_dim, module.scaling = other, own * (width / other) ** 0.5

        def restore() -> None:
            for module, own in zip(rotary, frequencies, strict=True):
                module.inv_freq = own
            for module, scaling in zip(attentions, scalings, strict=True):
                module.head_dim, module.scaling = width, scaling

        yield SettingChange(f"heads of {other} in place of {width} dimensions", regroup, restore, _OTHER)


def _no_window(model: nn.Module) -> Iterator[SettingChange]:
    """Attention to all tokens before, where a window leaves most of them out."""
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    windows = [(config, own) for config in configs.values() if (own := getattr(config, "sliding_window", None))]

    def restore() -> None:
        for config, own in windows:
            config.sliding_window = own

    def widen() -> None:
        for config, _ in windows:
            config.sliding_window = config.max_position_embeddings

    if windows and all(hasattr(config, "max_position_embeddings") for config, _ in windows):
        yield SettingChange(f"no window of {windows[0][1]} tokens", widen, restore, _OTHER)
