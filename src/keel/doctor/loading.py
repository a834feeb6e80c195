"""Loading errors: shifted token ids, misplaced weights, and settings of another model family.

Conversions between frameworks may swap layers or matrices of equal shape, or lose the base of the rotary positions.
Each error is undone as an experiment: if it was present, gold answers become more likely.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from keel.base.types import Group, Problem
from keel.doctor.decide import TESTING, Hypothesis, Table, decide, swap
from keel.doctor.evidence import level
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome, Verdict
from keel.doctor.rendering import TOKENIZER_ADVICE, TOKENIZER_CAUSE, Tokens
from keel.models.head import causal_lm
from keel.rollout.native.engine import NativeEngine

# ------------------------------------------------------------------------ token ids

NEAR = (-1, 1, -2, 2)


def token_ids(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Ids shifted by one, two or the number of special tokens, and added tokens split into original ones."""
    tokenizer: Any = subject.policy.tokenizer
    special, size = frozenset(tokenizer.all_special_ids), min(subject.vocabulary, len(tokenizer))

    def named(name: str, change: Callable[[Tokens], Tokens]) -> Hypothesis:
        parts = {part: lambda problem, own=own: change(own(problem)) for part, own in own_parts.items()}
        return Hypothesis(name, "model/tokenizer", TOKENIZER_CAUSE, TOKENIZER_ADVICE, swap(**parts))

    own_parts: dict[str, Callable[[Problem], Tokens]] = {"prompt": subject.prompt, "answer": subject.answer}
    for by in filter(None, dict.fromkeys((*NEAR, -len(special), len(special)))):
        for kind, fixed in (("ordinary ", special), ("", frozenset[int]())):
            shift = partial(_shifted, by=by, fixed=fixed, size=size)
            where = f"if the ids of all {kind}tokens are {abs(by)} {'higher' if by > 0 else 'lower'}"
            yield named(where, shift)
    problems = [problem for problem in subject.problems(TESTING) if subject.answer(problem)]
    used = {token for problem in problems for part in own_parts.values() for token in part(problem)}
    if spelt := _spelt_out(tokenizer, used):
        names = ", ".join(repr(tokenizer.decode([token])) for token in sorted(spelt)[:4])
        yield named(
            f"if tokens that were added to the vocabulary, such as {names}, are encoded as before they were added",
            lambda tokens: tuple(t for token in tokens for t in spelt.get(token, (token,))),
        )


def _shifted(tokens: Tokens, by: int, fixed: Collection[int], size: int) -> Tokens:
    """Ids shifted by `by`, modulo the vocabulary size."""
    return tuple(token if token in fixed else (token + by) % size for token in tokens)


def _spelt_out(tokenizer: Any, used: Collection[int]) -> dict[int, Tokens]:
    """The original tokens of each ordinary added token; empty for slow tokenizers, which cannot be analysed."""
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
    except Exception:  # custom parts cannot be serialised
        return {}
    spelt = {i: tuple(before.encode(text, add_special_tokens=False).ids) for i, text in added.items()}
    return {i: ids for i, ids in spelt.items() if ids and i not in ids}


# ------------------------------------------------------------------------ weights and settings

ALL_PAIRS = 6  # up to this many layers, all pairs are swapped; with more, only neighbours
BASES = (1e4, 5e5, 1e6)  # bases of rotary positions
ACTIVATIONS = ("silu", "gelu", "relu")
_FUNCTIONS = ("act_fn", "activation_fn", "act")  # attribute names of the activation in common modules
_CONVERTED = "the checkpoint was converted wrongly: weights are loaded into the wrong place"
_OTHER = (
    "the model is built with settings that it was not trained with: its config.json or its code belongs to another "
    "model"
)
_STRANGE = "the adapter was not trained on this base model, or is applied differently than in its training"
Setting = tuple[Any, str, Any]  # an object or dict, its attribute or key, and the new value
Settings = Callable[[], list[Setting]]  # evaluated only when tried


def weights(subject: KeelSubject) -> Iterator[Hypothesis]:
    for what, cause, settings in changes(causal_lm(subject.policy.model)):
        yield _loaded(f"with {what}", cause, partial(set_for_a_while, settings))


def changes(model: nn.Module) -> Iterator[tuple[str, str, Settings]]:
    """Common conversion errors of this model: the name, the cause, and the settings that undo it."""
    yield from (*_settings(model), *_places(_layers(model)))


def adapters(subject: KeelSubject) -> Iterator[Hypothesis]:
    """The model without its adapter, if the adapter has an effect."""
    model = subject.policy.model
    if any(bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name):
        yield _loaded("with the adapter switched off", _STRANGE, partial(_switched_off, model))


def _loaded(name: str, cause: str, changed: Callable[[], Any]) -> Hypothesis:
    """A hypothesis about the loaded model. Its completions come from the native engine on the changed model."""

    @contextmanager
    def apply(subject: Any) -> Iterator[Any]:
        def judged(problems: Sequence[Problem], **how: Any) -> list[Group]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning that decoding is slow
                engine = NativeEngine(subject.policy.model, subject.policy.tokenizer, graphs=False)
            groups: list[Group] = subject.swapped(engine=engine).judged(problems, **how)
            return groups

        with torch.no_grad(), changed():
            yield subject.swapped(judged=judged)

    advice = (
        "convert the checkpoint again with its original config.json, and compare its logits with the original model's "
        "before training"
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
        for parameter, own in trained:  # peft makes parameters trainable when it enables an adapter
            parameter.requires_grad_(own)


def _layers(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks: the longest list of modules of one class."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(child) for child in m}) == 1]
    return max(lists, key=len, default=nn.ModuleList())


def _settings(model: nn.Module) -> Iterator[tuple[str, str, Settings]]:
    """Settings of other families: the activation, the base of rotary positions, the head width, a sliding window."""
    from transformers.activations import ACT2FN

    functions = [(m, n, getattr(m, n)) for m in model.modules() for n in _FUNCTIONS if hasattr(m, n)]
    functions = [row for row in functions if isinstance(row[2], nn.Module)]
    for other in ACTIVATIONS if functions else ():
        function = ACT2FN[other]
        if not any(type(own) is type(function) for _, _, own in functions):
            yield f"{other} as the activation", _OTHER, partial(_all_set, functions, function)
    rotary: list[Any] = [
        m for m in model.modules() if isinstance(f := getattr(m, "inv_freq", None), torch.Tensor) and f.dim() == 1
    ]
    for base in BASES if rotary else ():
        yield f"a rotary base of {base:g}", _CONVERTED, partial(_based, rotary, base)
    attentions: list[Any] = [m for m in model.modules() if hasattr(m, "head_dim") and hasattr(m, "k_proj")]
    widths = {m.head_dim for m in attentions} | {2 * len(m.inv_freq) for m in rotary}
    plain = rotary and all(hasattr(m, "scaling") and not hasattr(m, "q_norm") for m in attentions)
    for width in widths if plain and len(widths) == 1 else ():
        for size in (width // 2, 2 * width):
            if size % 2 == 0 and not any(m.k_proj.weight.shape[0] % size for m in attentions):
                settings = partial(_heads, attentions, rotary, width, size)
                yield f"heads of {size} instead of {width} dimensions", _OTHER, settings
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    windows = [config for config in configs.values() if getattr(config, "sliding_window", None)]
    if windows and all(hasattr(config, "max_position_embeddings") for config in windows):
        widened: list[Setting] = [(config, "sliding_window", config.max_position_embeddings) for config in windows]
        yield (
            f"no sliding window (the configured one has {windows[0].sliding_window} tokens)",
            _OTHER,
            partial(list, widened),
        )


def _all_set(owners: Sequence[tuple[Any, str, Any]], value: Any) -> list[Setting]:
    return [(owner, name, value) for owner, name, _ in owners]


def _based(rotary: Sequence[Any], base: float) -> list[Setting]:
    return [(m, "inv_freq", _frequencies(len(m.inv_freq), base, m.inv_freq)) for m in rotary]


def _frequencies(count: int, base: float, like: torch.Tensor) -> torch.Tensor:
    return (torch.arange(count, device=like.device) * (-math.log(base) / count)).exp()


def _heads(attentions: Sequence[Any], rotary: Sequence[Any], width: int, other: int) -> list[Setting]:
    """The same matrices split into heads of another width."""
    base = float(rotary[0].inv_freq[1]) ** (-width / 2) if width > 2 else 1e4
    settings: list[Setting] = [(m, "inv_freq", _frequencies(other // 2, base, m.inv_freq)) for m in rotary]
    settings += [(m, "head_dim", other) for m in attentions]
    return settings + [(m, "scaling", m.scaling * (width / other) ** 0.5) for m in attentions]


def _places(layers: nn.ModuleList) -> Iterator[tuple[str, str, Settings]]:
    """Weights of equal shape swapped in all layers, square ones transposed, and pairs of layers swapped."""
    # only weights that all layers have; some layers may have experts
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    named = [
        name
        for name, shape in (shapes[0] if shapes else {}).items()
        if len(shape) <= 2 and ".lora_" not in name and all(own.get(name) == shape for own in shapes)
    ]
    for pair in combinations(named, 2):
        if shapes[0][pair[0]] == shapes[0][pair[1]]:
            yield f"{pair[0]} and {pair[1]} of all layers exchanged", _CONVERTED, partial(_exchanged, layers, pair)
    squares = [name for name in named if len(shapes[0][name]) == 2 and len(set(shapes[0][name])) == 1]
    for names in [(name,) for name in squares] + ([tuple(squares)] if len(squares) > 1 else []):
        yield f"{' and '.join(names)} of all layers transposed", _CONVERTED, partial(_transposed, layers, names)
    modules, count = layers._modules, len(layers)
    for i, j in combinations(range(count), 2) if count <= ALL_PAIRS else [(i, i + 1) for i in range(count - 1)]:
        swapped: list[Setting] = [(modules, str(i), layers[j]), (modules, str(j), layers[i])]
        yield f"layers {i} and {j} exchanged", _CONVERTED, partial(list, swapped)


def _exchanged(layers: nn.ModuleList, pair: tuple[str, str]) -> list[Setting]:
    rows = [[layer.get_parameter(name) for name in pair] for layer in layers]
    return [setting for a, b in rows for setting in ((a, "data", b.data), (b, "data", a.data))]


def _transposed(layers: nn.ModuleList, names: Sequence[str]) -> list[Setting]:
    weights = [layer.get_parameter(name) for layer in layers for name in names]
    return [(weight, "data", weight.data.t().contiguous()) for weight in weights]


# ------------------------------------------------------------------------ the measure


def _of_one_turn(subject: KeelSubject, problem: Problem) -> bool:
    return not subject.run.task.multi_turn


TABLES: dict[str, Table] = {
    # correct ids remove most of the NLL; a smaller gain may come from a task that is invariant to shifted digits
    "token ids": Table(token_ids, _of_one_turn, least=2 / 3),
    "weights": Table(weights, _of_one_turn, share=0.5, earns="surely more", knows=True),
    "adapter": Table(adapters, _of_one_turn, earns="surely more", knows=True),
}


def measure_loading(subject: KeelSubject) -> Outcome:
    """Whether gold answers become much more likely with shifted token ids, or with changed weights or settings."""
    if found := sorted(subject.found.intersection(_CODES)):
        return Outcome.of("loading", [Verdict.unchecked(_CODES, f"{found[0]} was already found")])
    verdicts = []
    simpler = list(subject.tried.values())  # other prompts may explain the same gain
    for table in TABLES.values():
        verdict, _ = decide(table, subject, alpha=level(subject.thresholds, looks=1), simpler=simpler)
        verdicts.append(verdict)
        if verdict.state == "found":
            break
    return Outcome.of("loading", verdicts, (f"loading: {verdicts[-1].reason}",))


_CODES = ("model/tokenizer", "model/missing-weights")

__all__ = ["TABLES", "measure_loading"]
