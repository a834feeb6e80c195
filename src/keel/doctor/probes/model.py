"""The likelihood of gold answers under the policy, and checks of its weights, tokenizer and end token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.rendering import messages_of, tokenizer_finding, word_by_word, words
from keel.doctor.subject import row_logits
from keel.envs import Task
from keel.models.head import causal_lm

# ------------------------------------------------------------------------ likelihood of gold answers

_GOLDS = 8  # number of problems


@dataclass(frozen=True)
class Gold:
    """The tokens of a problem's prompt and gold answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def golds(setup: KeelSubject) -> list[Gold]:
    """Prompts and first gold turns of the first problems, without those longer than the context; cached."""
    if "golds" not in setup.shared:
        task, encode = setup.run.task, setup.policy.tokenizer.encode
        problems = [] if task.prompts_only else setup.problems(_GOLDS)
        turns = [(gold_or_none(task, problem) or [""])[0] for problem in problems]
        pairs = [
            Gold(setup.prompt(problem), tuple(encode(turn, add_special_tokens=False)))
            for problem, turn in zip(problems, turns, strict=True)
        ]
        limit = setup.policy.context_length or 1 << 30
        setup.shared["golds"] = [g for g in pairs if g.prompt and g.answer and len(g.prompt) + len(g.answer) < limit]
    chosen: list[Gold] = setup.shared["golds"]
    return chosen


def gold_or_none(task: Task, problem: Problem) -> list[str] | None:
    """The gold turns; None if the problem has no answer or the task has no gold answers."""
    try:
        return task.gold_turns(problem) or None
    except (KeelError, NotImplementedError):
        return None


@dataclass(frozen=True)
class GoldReading:
    """Statistics of the policy on gold answers at temperature 1.

    `logp` has each answer's mean log-probability per token. `after` is the mean next-token distribution after the
    answers `[V]`. `written` and `entropy` are the mean distribution `[V]` and mean entropy over prompts and answers.
    """

    logp: list[float]
    after: Tensor
    written: Tensor
    entropy: float


def read_golds(setup: KeelSubject) -> GoldReading:
    """Run the policy on the gold answers; cached."""
    if "gold reading" not in setup.shared:
        chosen, means, entropies, after, written = golds(setup), [], [], [], []
        for gold, logits in zip(
            chosen, row_logits(setup.policy, [(*g.prompt, *g.answer) for g in chosen]), strict=True
        ):
            logp = logits.log_softmax(-1)
            answer = torch.tensor(gold.answer, device=logp.device)[:, None]
            means.append(float(logp[len(gold.prompt) - 1 : -1].gather(-1, answer).mean()))
            entropies.append(-float((logp.exp() * logp).sum(-1).mean()))
            after.append(logp[-1].exp())
            written.append(logp.exp().mean(0))
        averages = torch.stack(after).mean(0), torch.stack(written).mean(0)
        setup.shared["gold reading"] = GoldReading(means, *averages, fmean(entropies))
    reading: GoldReading = setup.shared["gold reading"]
    return reading


# ------------------------------------------------------------------------ checkpoint, tokenizer and end token

_RELABELLINGS = 200
_TEXTS = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a layer in a weight's name
_NEAR = 4.0  # standard errors of ln(std)
_TRAINED = 0.2  # |ln(std / initial std)| of a typical trained matrix
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")  # parts of a weight's name that adapters add


def probe_model(setup: KeelSubject) -> Outcome:
    """Find weights that were not loaded, another model's tokenizer, and end tokens that do not stop generation."""
    chosen = golds(setup)
    tokenizer = [*_round_trip(setup)] or [*_relabelled(setup, chosen)] or [*_beyond(setup, chosen)]
    return Outcome("model", (*_missing(setup), *tokenizer, *_end(setup, chosen)))


def _missing(setup: KeelSubject) -> Iterator[Finding]:
    """Report weights that the loader lists as missing, otherwise weights that cannot result from training."""
    policy = setup.policy
    cause = "names or shapes in the checkpoint differ from the model's, so missing weights are random"
    advice = "load the checkpoint with the class it was saved from, and check the names in its files (model.name)"
    if policy.missing:
        others = [
            f"{len(policy.unexpected)} weights of the checkpoint are not part of the model, such as {name}"
            for name in policy.unexpected[:1]
        ]
        yield finding(
            "model/missing-weights",
            f"{len(policy.missing)} of {len(policy.model.state_dict())} weights are not in the checkpoint, such as "
            f"{'; '.join([', '.join(policy.missing[:3]), *others])}",
            cause,
            advice,
        )
        return
    if left := unread(policy.model, policy.unexpected):
        yield finding(
            "model/missing-weights",
            f"{len(left)} weights of the checkpoint are not loaded, although the model has weights of the same kind, "
            f"such as {', '.join(left[:3])}",
            "the model is built smaller than the saved one: trained layers or biases are missing",
            "load the checkpoint with the config.json that it was saved with (num_hidden_layers, attention_bias)",
        )
        return
    if damage := _rows_alike(setup) or damaged_weights(setup):
        yield finding(
            "model/missing-weights",
            *damage,
            "use the published weights, and train the embeddings of new tokens before prompts contain them",
        )
    elif fresh := _fresh_layers(setup):
        yield finding("model/missing-weights", fresh, cause, advice)


def unread(model: torch.nn.Module, unexpected: Sequence[str]) -> list[str]:
    """Weights of the checkpoint that the model does not read although it has others of their kind.

    These are weights of further layers, whose names differ by a number only, and further weights of an existing module,
    such as a bias. Heads for another task and buffers of old versions are excluded.
    """
    names = [_WRAPPED.sub("", name) for name, _ in model.named_parameters()]
    kinds, modules = {_NUMBER.sub("#", name) for name in names}, {name.rpartition(".")[0] for name in names}
    return [name for name in unexpected if _NUMBER.sub("#", name) in kinds or name.rpartition(".")[0] in modules]


def _fresh_layers(setup: KeelSubject) -> str | None:
    """Evidence that some layers are as before training: constant norms and biases, matrices of the initial std."""
    model: Any = causal_lm(setup.policy.model)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    std, depth = (getattr(config, name, None) for name in ("initializer_range", "num_hidden_layers"))
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if (number := _NUMBER.search(name)) and parameter.is_floating_point() and ".lora_" not in name:
            layers.setdefault(name[: number.end()], []).append(parameter.detach())

    def off(matrix: Tensor) -> float:
        """|ln(std / initial std)| for the nearest of three initial values; the last is torch's default."""
        initial = (std or 0.02, (std or 0.02) / math.sqrt(2 * (depth or 1)), 1 / math.sqrt(3 * matrix.shape[1]))
        own = max(float(matrix.float().std()), 1e-12)
        return min(abs(math.log(own / each)) for each in initial)

    constant = {name: [bool((w == w[:1]).all()) for w in rows if w.dim() == 1] for name, rows in layers.items()}
    matrices = {name: [w for w in rows if w.dim() == 2] for name, rows in layers.items()}
    fresh = [
        name
        for name, rows in matrices.items()
        if constant[name] and all(constant[name]) and all(off(w) < _NEAR / math.sqrt(2 * w.numel()) for w in rows)
    ]
    if not 0 < len(fresh) <= len(layers) / 2:
        return None
    trained = [off(w) for name, rows in matrices.items() if name not in fresh for w in rows]
    if not trained or median(trained) < _TRAINED:
        return None
    return (
        f"all weights of {len(fresh)} of {len(layers)} layers have the statistics of a fresh initialisation, while the "
        f"others are trained: {', '.join(fresh[:3])}"
    )


ALIKE = 3  # least number of tokens with equal embeddings


def _rows_alike(setup: KeelSubject) -> tuple[str, str] | None:
    """Evidence and cause for tokens with equal embeddings. Added tokens are left out: they may be untrained."""
    tokenizer: Any = setup.policy.tokenizer
    added = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    used = sorted({token for gold in golds(setup) for token in (*gold.prompt, *gold.answer)} - added)
    embeddings = causal_lm(setup.policy.model).get_input_embeddings()
    if not used or not isinstance(embeddings, torch.nn.Embedding):
        return None
    rows = embeddings.weight.detach()[torch.tensor(used, device=embeddings.weight.device)]
    _, which, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    if int(counts.max()) < ALIKE:
        return None
    same = [token for token, row in zip(used, which.tolist(), strict=True) if row == int(counts.argmax())]
    names = ", ".join(repr(tokenizer.decode([token])) for token in same[:4])
    return (
        f"{len(same)} of {len(used)} tokens of prompts and gold answers have the same embedding, such as {names}",
        "embeddings were lost or filled when the vocabulary was resized or merged, so the model cannot distinguish "
        "these tokens",
    )


VALUES = 8  # distinct values of 3-bit weights
LOOKED_AT = 4096  # entries of a matrix that are examined


class _Damage(NamedTuple):
    """A sign of damage: its share of a matrix's entries, the largest usual share, and the texts of the finding."""

    share: Callable[[Tensor], float]
    most: float
    evidence: str
    cause: str


DAMAGE = (
    _Damage(
        lambda row: float(1 < len(row.unique()) <= VALUES),
        0.5,
        f"have at most {VALUES} different values",
        "the weights were rounded to a few bits",
    ),
    _Damage(
        lambda row: float((row.abs() == row.abs().max()).float().mean()),
        0.05,
        "have the largest magnitude of their matrix",
        "the weights were cast to a type with a smaller range, which clipped them",
    ),
    _Damage(
        lambda row: float((row == 0).float().mean()),
        0.8,  # usual pruning removes half
        "are zero",
        "the checkpoint was pruned, or shards are missing",
    ),
)


def damaged_weights(setup: KeelSubject) -> tuple[str, str] | None:
    """Evidence and cause if most matrices are damaged. Adapters and zero matrices are left out: they may be new."""
    named = causal_lm(setup.policy.model).named_parameters()
    matrices = [p for name, p in named if p.dim() == 2 and p.is_floating_point() and ".lora_" not in name]
    flat = [p.detach().flatten() for p in matrices if p.numel() > VALUES**2 and bool(p.any())]
    # random positions, since a fixed stride could hit the same column of every row
    seed = torch.Generator().manual_seed(0)
    rows = [row[torch.randint(len(row), (LOOKED_AT,), generator=seed).to(row.device)] for row in flat]
    for damage in DAMAGE:
        over = [share for share in map(damage.share, rows) if share > damage.most]
        if len(over) > len(rows) / 2:
            evidence = f"{100 * fmean(over):.0f} % of the entries of {len(over)} of {len(rows)} matrices"
            return f"{evidence} {damage.evidence}", f"{damage.cause}, so most of the training is lost"
    return None


def _round_trip(setup: KeelSubject) -> Iterator[Finding]:
    """Texts of the problems must survive encoding and decoding."""
    task, tokenizer = setup.run.task, setup.policy.tokenizer
    problems = task.sample(_TEXTS, seed=setup.config.run.seed, step=0)
    texts = [m["content"] for p in problems for m in messages_of(p) if m["role"] != "assistant"]
    lost = [(text, back) for text in texts if words(back := word_by_word(tokenizer, text)) != words(text)]
    gone = sum(len(set(words(text)) - set(words(back))) for text, back in lost)
    share = gone / max(1, sum(len(set(words(text))) for text in texts))
    if share > setup.thresholds["lost_words"]:
        text, back = lost[0]
        yield tokenizer_finding(
            f"{100 * share:.0f} % of the words of {len(texts)} texts are lost by encoding and decoding: {text[:50]!r} "
            f"becomes {back[:50]!r}"
        )


def _relabelled(setup: KeelSubject, chosen: Sequence[Gold]) -> Iterator[Finding]:
    """If a confident model has a high NLL on gold answers, it must still favour their tokens over random ones.

    A permutation test of its mean distribution over gold texts. A model that does not know the task or the template
    still knows the language.
    """
    uniform = math.log(setup.vocabulary)
    if not chosen or -fmean(read_golds(setup).logp) < setup.thresholds["gold_nll"] * uniform:
        return
    entropy, written = read_golds(setup).entropy, read_golds(setup).written.log()
    if entropy > setup.thresholds["entropy_uniform_share"] * uniform:
        return  # reported as random weights
    texts = ([t for gold in chosen for t in gold.answer], [t for gold in chosen for t in gold.prompt])
    tests = [_among_random(setup, written, tokens) for tokens in texts]
    own, others, chance = min(tests, key=lambda test: test[-1])
    if not setup.thresholds["relabelled_chance"] < chance < 1 - setup.thresholds["relabelled_chance"]:
        return  # under its own tokenizer, a model finds tokens clearly more or less likely than random ones
    yield tokenizer_finding(
        f"the model gives the tokens of gold answers and prompts a log-probability of {own:.3g} on average, and "
        f"random tokens {others:.3g} (p-value {chance:.2g}), although the model is confident (entropy {entropy:.2g} "
        f"of {uniform:.2g} nats)"
    )


def _among_random(setup: KeelSubject, written: Tensor, tokens: Sequence[int]) -> tuple[float, float, float]:
    """The mean log-probability of `tokens`, that of random other tokens, and the permutation p-value."""
    special = set(setup.policy.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(len(written), len(setup.policy.tokenizer))) if token not in special]
    place = {token: i for i, token in enumerate(ordinary)}
    chosen = torch.tensor([place[token] for token in tokens if token in place], dtype=torch.long)
    values = written[torch.tensor(ordinary, device=written.device)].cpu()
    if not len(chosen):
        return 0.0, 0.0, 1.0
    generator = torch.Generator().manual_seed(0)
    orders = (torch.randperm(len(values), generator=generator) for _ in range(_RELABELLINGS))
    others = torch.stack([values[order[chosen]].mean() for order in orders])
    own = float(values[chosen].mean())
    return own, float(others.mean()), float((others >= own).float().mean())


def _beyond(setup: KeelSubject, chosen: Sequence[Gold]) -> Iterator[Finding]:
    """The probability mass that a confident model gives to ids outside of the tokenizer."""
    if not chosen or read_golds(setup).entropy > setup.thresholds["entropy_uniform_share"] * math.log(setup.vocabulary):
        return
    written, size = read_golds(setup).written, len(setup.policy.tokenizer)
    mass = float(written[size:].sum())
    if mass > setup.thresholds["unknown_tokens"]:
        yield tokenizer_finding(
            f"on {len(chosen)} prompts and gold answers, the model gives {100 * mass:.0f} % of its probability to "
            f"{len(written) - size} ids that the tokenizer does not have"
        )


def _end(setup: KeelSubject, chosen: Sequence[Gold]) -> Iterator[Finding]:
    """The model's next tokens after gold answers, against the configured end tokens."""
    tokenizer, ends = setup.policy.tokenizer, setup.policy.eos_ids
    if not chosen:
        return
    after = read_golds(setup).after
    ended = float(after[list(ends)].sum())
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)} & set(range(len(after)))
    stops = {i for i in special if str(tokenizer.decode([i], skip_special_tokens=False)) in setup.sampling.stop}
    others = sorted(special - set(ends) - stops, key=lambda i: -float(after[i]))
    names = {i: repr(tokenizer.decode([i], skip_special_tokens=False)) for i in (*ends, *others[:1])}
    if others and float(after[others[0]]) > setup.thresholds["end_share"] and ended < 1 - setup.thresholds["end_share"]:
        yield _end_token(
            f"after {len(chosen)} gold answers, the model writes {names[others[0]]} with probability "
            f"{float(after[others[0]]):.2g}, which is not an end token, and {', '.join(names[i] for i in ends)} with "
            f"{ended:.2g}",
            "the tokenizer's eos_token and the generation config do not name the token that ends the model's turns",
        )
        return
    turns = [turn.completion for turn in setup.turns if turn.completion.tokens]
    for token in sorted(set(ends) - special - set(added)):
        stopped = sum(completion.tokens[-1] == token for completion in turns)
        if stopped > 1 and float(after[token]) < 1 - setup.thresholds["end_share"]:
            yield _end_token(
                f"{stopped} of {len(turns)} turns end at {names[token]}, which is not a special token, and after gold "
                f"answers the model writes {names[token]} with probability {float(after[token]):.2g}",
                "an ordinary token ends completions before the model's answer does",
            )
            return


def _end_token(evidence: str, cause: str) -> Finding:
    return finding(
        "model/end-token",
        evidence,
        cause,
        "set eos_token_id in the model's generation config (and eos_token of the tokenizer) to the token that ends "
        "its turns; until then, add its text to rollout.stop",
    )
