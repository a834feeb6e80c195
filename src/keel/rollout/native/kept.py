"""Keys and values kept between the turns of an episode, so that a turn reads only what is new."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from keel.models.fingerprint import adapter_layers


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """A prompt's tokens with its keys and values `[layers, 2, kv_heads, P, D]`, shared by all rows that begin so."""

    tokens: tuple[int, ...]
    kv: Tensor


@dataclass(frozen=True, eq=False)
class KeptRow:
    """A context that was read: its prompt, the tokens after it, and the keys and values of those."""

    prompt: KeptPrompt
    own: tuple[int, ...]
    kv: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.own)

    def begins(self, tokens: tuple[int, ...]) -> bool:
        """Whether `tokens` go on where this context ends."""
        start = len(self.prompt.tokens)
        return (
            self.length < len(tokens)
            and tokens[:start] == self.prompt.tokens
            and tokens[start : self.length] == self.own
        )


@dataclass
class KeptContexts:
    """The contexts of one rollout, at most `limit` bytes of them; what finds no room is read again when it goes on.

    They hold for one set of weights and one stream of noise: whatever else comes empties the store first.
    """

    limit: int
    rows: dict[int, KeptRow] = field(default_factory=dict)
    bytes: int = 0  # a shared prompt counted once
    _sharing: Counter[int] = field(default_factory=Counter)  # by prompt, the rows that begin with it
    _stamp: Any = None

    def enter(self, *stamp: Any) -> None:
        """Forget everything unless it was kept under this same stamp."""
        if stamp != self._stamp:
            self.forget()
            self._stamp = stamp

    def forget(self) -> None:
        self.rows.clear()
        self._sharing.clear()
        self.bytes = 0

    def find(self, key: int, tokens: tuple[int, ...]) -> KeptRow | None:
        """What is kept of this row, if its context begins with it."""
        row = self.rows.get(key)
        return row if row is not None and row.begins(tokens) else None

    def keep(self, key: int, row: KeptRow) -> None:
        """Remember a row in the place of its turn before, if there is room."""
        before = self.rows.pop(key, None)
        if before is not None:
            self._sharing[id(before.prompt.kv)] -= 1
            self.bytes -= self._added(before)
        if self.bytes + self._added(row) <= self.limit:
            self.bytes += self._added(row)
            self._sharing[id(row.prompt.kv)] += 1
            self.rows[key] = row

    def _added(self, row: KeptRow) -> int:
        """The bytes of a row that no other row has."""
        alone = [row.kv] if self._sharing[id(row.prompt.kv)] else [row.kv, row.prompt.kv]
        return sum(kv.numel() * kv.element_size() for kv in alone)


def weights_stamp(model: nn.Module) -> tuple[Any, ...]:
    """Changes when a weight is written to or replaced, or an adapter switched: what was kept is then of another model.

    torch counts the writes to a tensor; writes through `.data` are not counted, and nothing in Keel makes any.
    """
    tensors = tuple((id(p), p.data_ptr(), p._version) for p in model.parameters())
    adapters = tuple(
        (str(layer.active_adapters), layer.disable_adapters, str(getattr(layer, "merged_adapters", ())))
        for _, layer in adapter_layers(model)
    )
    scales = tuple(str(getattr(layer, "scaling", None)) for _, layer in adapter_layers(model))
    return tensors, adapters, scales


def stacked(prompts: list[KeptPrompt]) -> Tensor:
    """Prompts as one `[layers, 2, G, kv_heads, P, D]`, right-padded with zeros."""
    if len(prompts) == 1:
        return prompts[0].kv.unsqueeze(2)
    layers, two, heads, _, size = prompts[0].kv.shape
    width = max(len(prompt.tokens) for prompt in prompts)
    out = prompts[0].kv.new_zeros(layers, two, len(prompts), heads, width, size)
    for index, prompt in enumerate(prompts):
        out[:, :, index, :, : len(prompt.tokens)] = prompt.kv
    return out
