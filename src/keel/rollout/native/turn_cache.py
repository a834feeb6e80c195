"""The KV cache between the turns of an episode. With it, a turn prefills only new tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from keel.models.adapters import adapter_layers


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt's tokens, and its keys and values `[layers, 2, kv_heads, P, D]`, which all its rows share."""

    tokens: tuple[int, ...]
    kv: Tensor


@dataclass(frozen=True, eq=False)
class CachedRow:
    """A cached context: its prompt, the tokens after it (`suffix`), and the suffix's keys and values."""

    prompt: CachedPrompt
    suffix: tuple[int, ...]
    kv: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.suffix)

    def is_prefix_of(self, tokens: tuple[int, ...]) -> bool:
        """Whether this context is a prefix of `tokens`."""
        start = len(self.prompt.tokens)
        return (
            self.length < len(tokens)
            and tokens[:start] == self.prompt.tokens
            and tokens[start : self.length] == self.suffix
        )


@dataclass
class TurnCache:
    """The KV cache of a rollout's contexts, at most `limit` bytes. Contexts that do not fit are prefilled again.

    Entries are valid for one version of the weights and one noise stream. Another version clears the cache.
    """

    limit: int
    rows: dict[int, CachedRow] = field(default_factory=dict)
    bytes: int = 0  # a shared prompt counts once
    _prompt_rows: Counter[int] = field(default_factory=Counter)  # number of rows per prompt
    _version: Any = None

    def use_for(self, *version: Any) -> None:
        """Clear the cache unless its entries have this version."""
        if version != self._version:
            self.clear()
            self._version = version

    def clear(self) -> None:
        self.rows.clear()
        self._prompt_rows.clear()
        self.bytes = 0

    def lookup(self, key: int, tokens: tuple[int, ...]) -> CachedRow | None:
        """The cached row under this key, if it is a prefix of `tokens`."""
        row = self.rows.get(key)
        return row if row is not None and row.is_prefix_of(tokens) else None

    def put(self, key: int, row: CachedRow) -> None:
        """Remove the row of the previous turn, and store this one if there is room."""
        previous = self.rows.pop(key, None)
        if previous is not None:
            self._prompt_rows[id(previous.prompt.kv)] -= 1
            self.bytes -= self._unshared_bytes(previous)
        if self.bytes + self._unshared_bytes(row) <= self.limit:
            self.bytes += self._unshared_bytes(row)
            self._prompt_rows[id(row.prompt.kv)] += 1
            self.rows[key] = row

    def _unshared_bytes(self, row: CachedRow) -> int:
        """The bytes of a row that are not shared with other rows."""
        tensors = [row.kv] if self._prompt_rows[id(row.prompt.kv)] else [row.kv, row.prompt.kv]
        return sum(kv.numel() * kv.element_size() for kv in tensors)


def weights_layout(model: nn.Module) -> tuple[Any, ...]:
    """A key that changes when a weight is replaced or an adapter is switched. Captured graphs are then invalid."""
    adapters = tuple(
        (str(layer.active_adapters), layer.disable_adapters, str(getattr(layer, "merged_adapters", ())))
        for _, layer in adapter_layers(model)
    )
    scales = tuple(str(getattr(layer, "scaling", None)) for _, layer in adapter_layers(model))
    return tuple((id(p), p.data_ptr()) for p in model.parameters()), adapters, scales


def weights_version(model: nn.Module) -> tuple[Any, ...]:
    """A key that changes with the layout and with writes to weights. Cached KV is then invalid.

    It contains torch's count of writes to each tensor. Writes through `.data` are not counted; Keel has none.
    """
    return tuple(p._version for p in model.parameters()), *weights_layout(model)


def stack_prompts(prompts: list[CachedPrompt]) -> Tensor:
    """Stack prompts into one tensor `[layers, 2, G, kv_heads, P, D]`, right-padded with zeros."""
    if len(prompts) == 1:
        return prompts[0].kv.unsqueeze(2)
    layers, two, heads, _, size = prompts[0].kv.shape
    width = max(len(prompt.tokens) for prompt in prompts)
    out = prompts[0].kv.new_zeros(layers, two, len(prompts), heads, width, size)
    for index, prompt in enumerate(prompts):
        out[:, :, index, :, : len(prompt.tokens)] = prompt.kv
    return out
