"""Weights that were loaded into the wrong place: gold answers are likelier once they are put back.

Conversions between frameworks exchange layers and matrices of equal shapes, leave out a transposition, write rotary
queries and keys in the other order, or lose the base of the positions. Each is tried in reverse, as an experiment.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from keel.doctor.probes.around import bare_logp
from keel.doctor.probes.earnings import earned_otherwise
from keel.doctor.probes.evidence import level
from keel.doctor.probes.frames import matters, unframed_logp
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise, drawn_golds, golds, read_golds
from keel.doctor.probes.settings import SettingChange, other_settings
from keel.doctor.probes.system_prompt import better_unasked
from keel.doctor.probes.templates import of_gains
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.models.head import causal_lm
from keel.rollout.engine import Engine
from keel.rollout.native.engine import NativeEngine

CHOOSING = 8  # problems that choose a change
TESTING = 64  # that are drawn to test it, where it promises something
ALL_PAIRS = 6  # layers up to which any two are exchanged; of more, neighbours
BASES = (1e4, 5e5, 1e6)  # of rotary positions
_ROTATED = re.compile(r"\b[qk]_proj\.(?:base_layer\.)?(?:weight|bias)$")
_FUSED = "q_proj", "k_proj", "v_proj"
_SIMPLER = 0.7  # of a gain that other questions or another template have to make to be the likelier cause
SECONDS = 20.0  # after which no further change is tried


def misplaced_weights(setup: ProbeSetup, thresholds: Thresholds) -> tuple[str, str] | None:
    """Evidence and cause of the change under which gold answers are likelier by far; None where there is none.

    Half of their surprise is proof enough, where neither questions nor template explain it; else what completions earn.
    """
    first = golds(setup)[:CHOOSING]
    if setup.run.task.multi_turn or len(first) < CHOOSING:
        return None
    own = read_golds(setup).logp[:CHOOSING]
    certain = [0.0] * len(first)
    if not matters(first, own, certain, thresholds) or better_unasked(setup, thresholds) is not None:
        return None  # nothing to explain, or it is explained
    began, scores = time.monotonic(), list[tuple[float, SettingChange]]()
    for change in changes(causal_lm(setup.policy.model)):
        if time.monotonic() - began > SECONDS:
            break
        with suppress(RuntimeError, TypeError, ValueError), _made(change):  # a family may not take a change
            scores.append((fmean(answer_logp(setup, first)), change))
    score, best = max(scores, key=lambda pair: pair[0], default=(0.0, None))
    if best is None or not matters(first, own, [score] * len(first), thresholds):
        return None
    rest = [g for g in dict.fromkeys(drawn_golds(setup, TESTING)) if g not in first]
    if len(rest) < CHOOSING:
        return None
    before = answer_logp(setup, rest)
    with _made(best):
        after = answer_logp(setup, rest)
    tested = [b - a for a, b in zip(before, after, strict=True)]
    chance = of_gains(tested)
    if (
        not matters(rest, before, after, thresholds)
        or -fmean(after) >= blind_surprise(setup, thresholds)
        or not _tells_apart(rest, after)
        # it is the questions, or their template, that confuse the model, and not its weights
        or max(bare_logp(setup), unframed_logp(setup)) > fmean(before) + _SIMPLER * fmean(tested)
    ):
        return None
    proven = not best.has_to_earn and chance <= level(thresholds) and fmean(tested) > -fmean(before) / 2
    within = partial(_sampler, setup, best)
    earned = None if proven else earned_otherwise(setup, setup.config, thresholds, within=within)
    if not proven and (earned is None or not earned.sure):
        return None
    evidence = (
        f"gold answers are {fmean(tested):.2g} nats a token likelier with {best.what} ({len(tested)} problems, chance "
        f"{chance:.1g})" + (f", and completions earn {earned}" if earned is not None else "")
    )
    return evidence, best.cause


def _tells_apart(golds: Sequence[Gold], logp: Sequence[float]) -> bool:
    """Whether answers are likelier than by how often each is right: else it is no question that is answered."""
    counts = Counter(gold.answer for gold in golds)
    if len(counts) > len(golds) / 2:
        return True
    often = fmean(math.log(counts[gold.answer] / len(golds)) for gold in golds)
    return fmean(len(gold.answer) * value for gold, value in zip(golds, logp, strict=True)) > often


@contextmanager
def _sampler(setup: ProbeSetup, change: SettingChange) -> Iterator[Engine]:
    """An engine on the model as it is under a change, whatever the run samples with."""
    with _made(change), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it decodes slowly
        yield NativeEngine(setup.policy.model, setup.policy.tokenizer, graphs=False)


@contextmanager
def _made(change: SettingChange) -> Iterator[None]:
    with torch.no_grad():
        change.apply()  # moves what is there and computes nothing: a change that could fail halfway is not offered
        try:
            yield
        finally:
            change.undo()


def changes(model: nn.Module) -> Iterator[SettingChange]:
    """What conversions get wrong, of this model: settings, rotary order and base, weights within layers, layers."""
    layers = _layers(model)
    yield from other_settings(model)
    yield from _rotary(model, layers)
    if len(layers):
        yield from _fused(layers)
        yield from _within_layers(layers)
    if len(layers) > 1:
        yield from _exchanged_layers(layers)


def _layers(model: nn.Module) -> nn.ModuleList:
    """The blocks of the model: its longest list of modules of one class."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(child) for child in m}) == 1]
    return max(lists, key=len, default=nn.ModuleList())


def _exchanged_layers(layers: nn.ModuleList) -> Iterator[SettingChange]:
    count = len(layers)
    near = [(i, i + 1) for i in range(count - 1)]
    for i, j in combinations(range(count), 2) if count <= ALL_PAIRS else near:

        def exchange(i: int = i, j: int = j) -> None:
            layers[i], layers[j] = layers[j], layers[i]

        yield SettingChange(f"layers {i} and {j} exchanged", exchange, exchange)
    if count > 2:

        def turn() -> None:
            for i, layer in enumerate(reversed([*layers])):
                layers[i] = layer

        yield SettingChange("the layers in the opposite order", turn, turn)


def _within_layers(layers: nn.ModuleList) -> Iterator[SettingChange]:
    """Two weights of equal shape exchanged, and square ones transposed, in all layers at once."""
    # of those that all layers have: some have experts, some not
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    named = {
        name: p
        for name, p in layers[0].named_parameters()
        if p.dim() <= 2 and ".lora_" not in name and all(own.get(name) == p.shape for own in shapes)
    }
    for one, other in combinations(named, 2):
        if named[one].shape != named[other].shape:
            continue
        pairs = [(_weight(layer, one), _weight(layer, other)) for layer in layers]

        def exchange(pairs: list[tuple[nn.Parameter, nn.Parameter]] = pairs) -> None:
            for a, b in pairs:
                a.data, b.data = b.data, a.data

        yield SettingChange(f"{one} and {other} of all layers exchanged", exchange, exchange)
    squares = [name for name, weight in named.items() if weight.dim() == 2 and weight.shape[0] == weight.shape[1]]
    for names in [(name,) for name in squares] + ([tuple(squares)] if len(squares) > 1 else []):
        turned = [_weight(layer, name) for layer in layers for name in names]

        def transpose(turned: list[nn.Parameter] = turned) -> None:
            for square in turned:
                square.data = square.data.t().contiguous()

        yield SettingChange(f"{' and '.join(names)} of all layers transposed", transpose, transpose)


def _fused(layers: nn.ModuleList) -> Iterator[SettingChange]:
    """Queries, keys and values that lay in one matrix, group by group, and were split as if all queries came first."""
    attentions: list[Any] = [m for layer in layers for m in layer.modules() if all(hasattr(m, p) for p in _FUSED)]
    modules = [[getattr(getattr(m, part), "base_layer", getattr(m, part)) for part in _FUSED] for m in attentions]
    parts: list[list[Any]] = [[getattr(module, "weight", None) for module in row] for row in modules]
    plain = all(isinstance(p, nn.Parameter) and p.dim() == 2 and p.is_floating_point() for row in parts for p in row)
    if not parts or not plain or any(not isinstance(getattr(m, "head_dim", None), int) for m in attentions):
        return
    before = [[weight.data for weight in weights] for weights in parts]

    def split() -> None:
        try:
            for attention, weights in zip(attentions, parts, strict=True):
                groups = len(weights[1]) // attention.head_dim  # heads of keys, with their queries and values
                rows = torch.cat([weight.data for weight in weights]).unflatten(0, (groups, -1))
                sizes = [len(weight) // groups for weight in weights]
                for weight, part in zip(weights, rows.split(sizes, dim=1), strict=True):
                    weight.data = part.flatten(0, 1).contiguous()
        except RuntimeError:  # out of memory: what was split already is put back
            restore()
            raise

    def restore() -> None:
        for weights, own in zip(parts, before, strict=True):
            for weight, data in zip(weights, own, strict=True):
                weight.data = data

    fits = (
        len(k) == len(v) and len(k) > m.head_dim and len(k) % m.head_dim == 0 and len(q) % len(k) == 0
        for m, (q, k, v) in zip(attentions, parts, strict=True)
    )
    if all(fits):
        yield SettingChange("queries, keys and values taken from one matrix group by group", split, restore)


def _weight(layer: nn.Module, name: str) -> nn.Parameter:
    return layer.get_parameter(name)


def _rotary(model: nn.Module, layers: nn.ModuleList) -> Iterator[SettingChange]:
    """Other bases of the positions, and queries and keys with their halves in the place of every other row."""
    frequencies = [b for name, b in model.named_buffers() if name.endswith("inv_freq") and b.dim() == 1]
    if len({len(b) for b in frequencies}) != 1:  # none, or heads of several sizes
        return
    originals = [b.clone() for b in frequencies]
    half = len(frequencies[0])

    def restore() -> None:
        for buffer, before in zip(frequencies, originals, strict=True):
            buffer.copy_(before)

    for base in BASES:

        def rebase(base: float = base) -> None:
            for buffer in frequencies:
                steps = torch.arange(half, device=buffer.device, dtype=torch.float32) / half
                buffer.copy_((-steps * math.log(base)).exp())

        yield SettingChange(f"rotary positions of base {base:g}", rebase, restore)
    rotated = [
        p
        for layer in layers
        for name, p in layer.named_parameters()
        if _ROTATED.search(name) and p.shape[0] % (2 * half) == 0
    ]
    if not rotated:
        return
    # row 2i of a head and row 2i + 1 turn together in one order, row i and row i + half in the other
    order = torch.arange(2 * half).view(half, 2).t().flatten()

    def permute(order: Tensor) -> None:
        for weight in rotated:
            heads = weight.data.view(-1, 2 * half, *weight.shape[1:])
            weight.data = heads[:, order.to(weight.device)].reshape(weight.shape)

    yield SettingChange(
        "rotary halves in the place of every other row", lambda: permute(order), lambda: permute(order.argsort())
    )
    yield SettingChange(
        "every other row in the place of rotary halves", lambda: permute(order.argsort()), lambda: permute(order)
    )
