"""The KV cache between the turns of an episode: a turn prefills only the tokens that are new."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from keel.models.adapters import adapter_layers


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt's tokens with its keys and values `[layers, 2, kv_heads, P, D]`, shared by all rows that begin so."""

    tokens: tuple[int, ...]
    kv: Tensor


@dataclass(frozen=True, eq=False)
class CachedRow:
    """A context in the cache: its prompt, the tokens after it (`suffix`), and the keys and values of those."""

    prompt: CachedPrompt
    suffix: tuple[int, ...]
    kv: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.suffix)

    def is_prefix_of(self, tokens: tuple[int, ...]) -> bool:
        """Whether `tokens` go on where this context ends."""
        start = len(self.prompt.tokens)
        return (
            self.length < len(tokens)
            and tokens[:start] == self.prompt.tokens
            and tokens[start : self.length] == self.suffix
        )


@dataclass
class TurnCache:
    """KV of one rollout's contexts, at most `limit` bytes; a context that finds no room is prefilled again.

    Entries are valid for one version of the weights and one stream of noise; any other empties the cache.
    """

    limit: int
    rows: dict[int, CachedRow] = field(default_factory=dict)
    bytes: int = 0  # a shared prompt counted once
    _prompt_rows: Counter[int] = field(default_factory=Counter)  # rows by prompt
    _version: Any = None

    def use_for(self, *version: Any) -> None:
        """Clear the cache unless its entries are of this version."""
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
        """Replace the row of the turn before, if there is room."""
        previous = self.rows.pop(key, None)
        if previous is not None:
            self._prompt_rows[id(previous.prompt.kv)] -= 1
            self.bytes -= self._unshared_bytes(previous)
        if self.bytes + self._unshared_bytes(row) <= self.limit:
            self.bytes += self._unshared_bytes(row)
            self._prompt_rows[id(row.prompt.kv)] += 1
            self.rows[key] = row

    def _unshared_bytes(self, row: CachedRow) -> int:
        """The bytes of a row that no other row shares."""
        tensors = [row.kv] if self._prompt_rows[id(row.prompt.kv)] else [row.kv, row.prompt.kv]
        return sum(kv.numel() * kv.element_size() for kv in tensors)


def weights_layout(model: nn.Module) -> tuple[Any, ...]:
    """Changes when a weight is replaced or an adapter switched: a graph that was captured before is another model's."""
    adapters = tuple(
        (str(layer.active_adapters), layer.disable_adapters, str(getattr(layer, "merged_adapters", ())))
        for _, layer in adapter_layers(model)
    )
    scales = tuple(str(getattr(layer, "scaling", None)) for _, layer in adapter_layers(model))
    return tuple((id(p), p.data_ptr()) for p in model.parameters()), adapters, scales


def weights_version(model: nn.Module) -> tuple[Any, ...]:
    """Changes with the layout and when a weight is written to: cached KV is then another model's.

    torch counts the writes to a tensor; writes through `.data` are not counted, and nothing in Keel makes any.
    """
    return tuple(p._version for p in model.parameters()), *weights_layout(model)


def stack_prompts(prompts: list[CachedPrompt]) -> Tensor:
    """Prompts as one `[layers, 2, G, kv_heads, P, D]`, right-padded with zeros."""
    if len(prompts) == 1:
        return prompts[0].kv.unsqueeze(2)
    layers, two, heads, _, size = prompts[0].kv.shape
    width = max(len(prompt.tokens) for prompt in prompts)
    out = prompts[0].kv.new_zeros(layers, two, len(prompts), heads, width, size)
    for index, prompt in enumerate(prompts):
        out[:, :, index, :, : len(prompt.tokens)] = prompt.kv
    return out
