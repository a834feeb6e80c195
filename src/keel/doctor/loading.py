"""What was loaded wrongly: token ids that are off, weights in the wrong place, settings of another family.

Conversions between frameworks exchange layers and matrices of equal shapes, leave out a transposition, write rotary
queries and keys in the other order, or lose the base of the positions. Each is tried in reverse, as an experiment:
gold answers are likelier once it is put back.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from keel.base.types import Group, Problem
from keel.doctor.decide import TESTING, Table, decide
from keel.doctor.evidence import level
from keel.doctor.frame import Tokens
from keel.doctor.hypothesis import Hypothesis, swap
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import TOKENIZER_ADVICE, TOKENIZER_CAUSE
from keel.doctor.verdict import Outcome, Verdict
from keel.models.head import causal_lm
from keel.rollout.native.engine import NativeEngine

# ------------------------------------------------------------------------ token ids

NEAR = (-1, 1, -2, 2)


def token_ids(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Ids that are off by one or two, or by as many as there are special tokens; added tokens as they were before."""
    tokenizer: Any = subject.policy.tokenizer
    special, size = frozenset(tokenizer.all_special_ids), min(subject.vocabulary, len(tokenizer))

    def named(name: str, change: Callable[[Tokens], Tokens]) -> Hypothesis:
        parts = {part: lambda problem, own=own: change(own(problem)) for part, own in own_parts.items()}
        return Hypothesis(name, "model/tokenizer", TOKENIZER_CAUSE, TOKENIZER_ADVICE, swap(**parts))

    own_parts: dict[str, Callable[[Problem], Tokens]] = {"prompt": subject.prompt, "answer": subject.answer}
    for by in filter(None, dict.fromkeys((*NEAR, -len(special), len(special)))):
        for kind, fixed in (("ordinary ", special), ("", frozenset[int]())):
            shift = partial(_shifted, by=by, fixed=fixed, size=size)
            where = f"where the ids of all {kind}tokens are {abs(by)} {'higher' if by > 0 else 'lower'}"
            yield named(where, shift)
    problems = [problem for problem in subject.problems(TESTING) if subject.answer(problem)]
    used = {token for problem in problems for part in own_parts.values() for token in part(problem)}
    if spelt := _spelt_out(tokenizer, used):
        names = ", ".join(repr(tokenizer.decode([token])) for token in sorted(spelt)[:4])
        yield named(
            f"where tokens that were added to the vocabulary, such as {names}, are written as before",
            lambda tokens: tuple(t for token in tokens for t in spelt.get(token, (token,))),
        )


def _shifted(tokens: Tokens, by: int, fixed: Collection[int], size: int) -> Tokens:
    """Ids `by` higher, around the vocabulary's end."""
    return tuple(token if token in fixed else (token + by) % size for token in tokens)


def _spelt_out(tokenizer: Any, used: Collection[int]) -> dict[int, Tokens]:
    """Of each ordinary token of these that was added, what its text was before; nothing of tokenizers unread."""
    from tokenizers import Tokenizer

    added = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if not token.special}
    added = {i: text for i, text in added.items() if i in used}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not added or backend is None:
        return {}
    try:
        content = json.loads(backend.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
        before = Tokenizer.from_str(json.dumps(content))
    except Exception:  # parts of one's own cannot be written out
        return {}
    spelt = {i: tuple(before.encode(text, add_special_tokens=False).ids) for i, text in added.items()}
    return {i: ids for i, ids in spelt.items() if ids and i not in ids}


# ------------------------------------------------------------------------ weights and settings

ALL_PAIRS = 6  # layers up to which any two are exchanged; of more, neighbours
BASES = (1e4, 5e5, 1e6)  # of rotary positions
ACTIVATIONS = ("silu", "gelu", "relu")
_FUNCTIONS = ("act_fn", "activation_fn", "act")  # what modules call theirs
_ROTATED = re.compile(r"\b[qk]_proj\.(?:base_layer\.)?(?:weight|bias)$")
_FUSED = "q_proj", "k_proj", "v_proj"
_CONVERTED = "the checkpoint was converted wrongly: what was trained for one place is loaded into another"
_OTHER = "the model is built with settings that it was not trained with: its config.json or its code is another one's"
_STRANGE = "the adapter was not trained on this base, or is read in another way than it was trained"
Setting = tuple[Any, str, Any]  # an object, or a dict, its attribute or key, and what that is set to
Settings = Callable[[], list[Setting]]  # computed only when they are tried


def weights(subject: KeelSubject) -> Iterator[Hypothesis]:
    for what, cause, settings in changes(causal_lm(subject.policy.model)):
        yield _loaded(f"with {what}", cause, partial(set_for_a_while, settings))


def changes(model: nn.Module) -> Iterator[tuple[str, str, Settings]]:
    """What conversions get wrong, of this model: what it is, its cause, and the settings that put it back."""
    layers = _layers(model)
    yield from (*_family(model), *_rotary(model, layers), *_places(layers))


def adapters(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Without an adapter that does something: it may be what makes the model worse at these answers, and meant."""
    model = subject.policy.model
    if any(bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name):
        yield _loaded("with the adapter switched off", _STRANGE, partial(_switched_off, model))


def _loaded(name: str, cause: str, changed: Callable[[], Any]) -> Hypothesis:
    """What samples under it is a sampler on the model as it is then, whatever the run samples with."""

    @contextmanager
    def apply(subject: Any) -> Iterator[Any]:
        def judged(problems: Sequence[Problem], **how: Any) -> list[Group]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it decodes slowly
                engine = NativeEngine(subject.policy.model, subject.policy.tokenizer, graphs=False)
            groups: list[Group] = subject.swapped(engine=engine).judged(problems, **how)
            return groups

        with torch.no_grad(), changed():
            yield subject.swapped(judged=judged)

    advice = (
        "convert the checkpoint anew with the config.json that it was trained with, and compare its logits with those "
        "of the original before training"
    )
    return Hypothesis(name, "model/missing-weights", cause, advice, apply)


@contextmanager
def set_for_a_while(settings: Settings) -> Iterator[None]:
    chosen = settings()
    before = [
        (owner, name, owner[name] if isinstance(owner, dict) else getattr(owner, name)) for owner, name, _ in chosen
    ]
    try:
        _set(chosen)
        yield
    finally:
        _set(before)


def _set(settings: Sequence[Setting]) -> None:
    for owner, name, value in settings:
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


@contextmanager
def _switched_off(model: nn.Module) -> Iterator[None]:
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_B")]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module in adapted:
            module.enable_adapters(False)
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
        for parameter, own in trained:  # peft makes trainable what it switches on
            parameter.requires_grad_(own)


def _layers(model: nn.Module) -> nn.ModuleList:
    """The blocks of the model: its longest list of modules of one class."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(child) for child in m}) == 1]
    return max(lists, key=len, default=nn.ModuleList())


def _family(model: nn.Module) -> Iterator[tuple[str, str, Settings]]:
    """Settings of another family: activations, heads of another width, no window."""
    from transformers.activations import ACT2FN

    found = [(m, n, getattr(m, n)) for m in model.modules() for n in _FUNCTIONS if hasattr(m, n)]
    found = [(module, name, own) for module, name, own in found if isinstance(own, nn.Module)]
    for other in ACTIVATIONS if found else ():
        function = ACT2FN[other]
        if not any(type(own) is type(function) for _, _, own in found):
            yield f"{other} for the activation", _OTHER, partial(lambda f: [(m, n, f) for m, n, _ in found], function)
    attentions: list[Any] = [m for m in model.modules() if hasattr(m, "head_dim") and hasattr(m, "k_proj")]
    rotary: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    widths = {m.head_dim for m in attentions} | {2 * len(m.inv_freq) for m in rotary}
    odd = any(hasattr(m, "q_norm") or not hasattr(m, "scaling") for m in attentions)
    for width in widths if len(widths) == 1 and rotary and not odd else ():
        base = float(rotary[0].inv_freq[1]) ** (-width / 2) if width > 2 else 1e4
        for size in (width // 2, 2 * width):
            if size % 2 == 0 and not any(m.k_proj.weight.shape[0] % size for m in attentions):
                settings = partial(_heads, attentions, rotary, width, size, base)
                yield f"heads of {size} in place of {width} dimensions", _OTHER, settings
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    windows = [config for config in configs.values() if getattr(config, "sliding_window", None)]
    if windows and all(hasattr(config, "max_position_embeddings") for config in windows):
        widened = [(config, "sliding_window", config.max_position_embeddings) for config in windows]
        yield f"no window of {windows[0].sliding_window} tokens", _OTHER, lambda: widened


def _heads(attentions: Sequence[Any], rotary: Sequence[Any], width: int, other: int, base: float) -> list[Setting]:
    """The same matrices cut into heads of another width."""
    settings: list[Setting] = [(m, "inv_freq", _frequencies(other // 2, base, m.inv_freq)) for m in rotary]
    settings += [(m, "head_dim", other) for m in attentions]
    return settings + [(m, "scaling", m.scaling * (width / other) ** 0.5) for m in attentions]


def _frequencies(count: int, base: float, like: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(count, device=like.device, dtype=torch.float32) / count
    return (-steps * math.log(base)).exp()


def _rotary(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[str, str, Settings]]:
    """Other bases of the positions, and queries and keys with their halves in the place of every other row."""
    owners: list[Any] = [
        m for m in model.modules() if isinstance(f := getattr(m, "inv_freq", None), torch.Tensor) and f.dim() == 1
    ]
    if len({len(m.inv_freq) for m in owners}) != 1:  # none, or heads of several sizes
        return
    half = len(owners[0].inv_freq)
    for base in BASES:
        yield (
            f"rotary positions of base {base:g}",
            _CONVERTED,
            partial(lambda base: [(m, "inv_freq", _frequencies(half, base, m.inv_freq)) for m in owners], base),
        )
    rotated = [
        p
        for layer in layers
        for name, p in layer.named_parameters()
        if _ROTATED.search(name) and p.shape[0] % (2 * half) == 0
    ]
    # row 2i of a head and row 2i + 1 turn together in one order, row i and row i + half in the other
    order = torch.arange(2 * half).view(half, 2).t().flatten()
    for what, chosen in (
        ("rotary halves in the place of every other row", order),
        ("every other row in the place of rotary halves", order.argsort()),
    ):
        if rotated:
            yield (
                what,
                _CONVERTED,
                partial(lambda chosen: [(p, "data", _reordered(p, chosen)) for p in rotated], chosen),
            )


def _reordered(weight: nn.Parameter, order: torch.Tensor) -> torch.Tensor:
    heads = weight.data.view(-1, len(order), *weight.shape[1:])
    return heads[:, order.to(weight.device)].reshape(weight.shape)


def _places(layers: nn.ModuleList) -> Iterator[tuple[str, str, Settings]]:
    """Fused matrices cut anew, weights of equal shape exchanged, square ones transposed, layers exchanged."""
    if not len(layers):
        return
    yield from _fused(layers)
    # of the weights that all layers have: some have experts, some not
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    named = {
        name: p
        for name, p in layers[0].named_parameters()
        if p.dim() <= 2 and ".lora_" not in name and all(own.get(name) == p.shape for own in shapes)
    }

    def of_all(*names: str) -> list[nn.Parameter]:
        return [layer.get_parameter(name) for layer in layers for name in names]

    for one, other in combinations(named, 2):
        if named[one].shape == named[other].shape:
            pairs = [*zip(of_all(one, other), of_all(other, one), strict=True)]
            what = f"{one} and {other} of all layers exchanged"
            yield what, _CONVERTED, partial(lambda pairs: [(a, "data", b.data) for a, b in pairs], pairs)
    squares = [name for name, weight in named.items() if weight.dim() == 2 and weight.shape[0] == weight.shape[1]]
    for names in [(name,) for name in squares] + ([tuple(squares)] if len(squares) > 1 else []):
        turned, what = of_all(*names), f"{' and '.join(names)} of all layers transposed"
        yield what, _CONVERTED, partial(lambda turned: [(p, "data", p.data.t().contiguous()) for p in turned], turned)
    modules, count = layers._modules, len(layers)
    near = [(i, i + 1) for i in range(count - 1)]
    for i, j in combinations(range(count), 2) if count <= ALL_PAIRS else near:
        yield (
            f"layers {i} and {j} exchanged",
            _CONVERTED,
            partial(lambda i, j: [(modules, str(i), layers[j]), (modules, str(j), layers[i])], i, j),
        )
    if count > 2:
        turn: Settings = lambda: [(modules, str(i), layers[count - 1 - i]) for i in range(count)]  # noqa: E731
        yield "the layers in the opposite order", _CONVERTED, turn


def _fused(layers: nn.ModuleList) -> Iterator[tuple[str, str, Settings]]:
    """Queries, keys and values that lay in one matrix, group by group, and were split as if all queries came first."""
    attentions: list[Any] = [m for layer in layers for m in layer.modules() if all(hasattr(m, p) for p in _FUSED)]
    modules = [[getattr(getattr(m, part), "base_layer", getattr(m, part)) for part in _FUSED] for m in attentions]
    parts: list[list[Any]] = [[getattr(module, "weight", None) for module in row] for row in modules]
    plain = all(isinstance(p, nn.Parameter) and p.dim() == 2 and p.is_floating_point() for row in parts for p in row)
    if not parts or not plain or any(not isinstance(getattr(m, "head_dim", None), int) for m in attentions):
        return

    def split() -> list[Setting]:
        settings = list[Setting]()
        for attention, row in zip(attentions, parts, strict=True):
            groups = len(row[1]) // attention.head_dim  # heads of keys, with their queries and values
            rows = torch.cat([weight.data for weight in row]).unflatten(0, (groups, -1))
            cut = rows.split([len(weight) // groups for weight in row], dim=1)
            settings += [(w, "data", part.flatten(0, 1).contiguous()) for w, part in zip(row, cut, strict=True)]
        return settings

    fits = (
        len(k) == len(v) and len(k) > m.head_dim and len(k) % m.head_dim == 0 and len(q) % len(k) == 0
        for m, (q, k, v) in zip(attentions, parts, strict=True)
    )
    if all(fits):
        yield "queries, keys and values taken from one matrix group by group", _CONVERTED, split


# ------------------------------------------------------------------------ all of them


def _of_one_turn(subject: KeelSubject, problem: Problem) -> bool:
    return not subject.run.task.multi_turn


TABLES: dict[str, Table] = {
    # the right ids leave little of the surprise: a task may be much the same with all its digits moved
    "token ids": Table(token_ids, _of_one_turn, least=2 / 3),
    "weights": Table(weights, _of_one_turn, share=0.5, earns="surely more", knows=True),
    "adapter": Table(adapters, _of_one_turn, earns="surely more", knows=True),
}


def measure_loading(subject: KeelSubject) -> Outcome:
    """Token ids moved, weights and settings put elsewhere: which makes gold answers likelier by far."""
    if found := sorted(subject.found.intersection(_CODES)):
        return Outcome.of("loading", [Verdict.unchecked(_CODES, f"{found[0]} is found already")])
    verdicts = []
    simpler = [hypothesis for name, hypothesis in subject.tried.items() if name in SIMPLER]
    for table in TABLES.values():
        verdict, _ = decide(table, subject, alpha=level(subject.thresholds, looks=1), simpler=simpler)
        verdicts.append(verdict)
        if verdict.state == "found":
            break
    return Outcome.of("loading", verdicts, (f"loading: {verdicts[-1].reason}",))


_CODES = ("model/tokenizer", "model/missing-weights")
SIMPLER = ("a part of the template", "the system prompt", "what questions share")  # explain an answer by its prompt

__all__ = ["TABLES", "measure_loading"]
