"""The model against its checkpoint, its tokenizer and its end token."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.evidence import chance_above, level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.damaged import damaged_weights
from keel.doctor.probes.gold_likelihood import Gold, gold_or_none, golds, read_golds
from keel.doctor.probes.initial import untrained_weights
from keel.doctor.rendering import messages_of, tokenizer_finding, word_by_word, words
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome

_RELABELLINGS = 200
_TEXTS = 8
_BLANKS = (" ", "\u0120", "\u2581")  # as it is, and as byte-level and sentence-piece vocabularies write it
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, in a weight's name
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")  # what adapters add to it


def probe_model(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Weights that were not loaded, a tokenizer of another model, an end that nobody stops at."""
    chosen = golds(setup)
    missing = [*_missing(setup, thresholds)]
    tokenizer = (
        [*_round_trip(setup, thresholds)]
        or [*_relabelled(setup, chosen, thresholds)]
        or [*_beyond(setup, chosen, thresholds)]
    )
    findings = [
        *missing,
        *tokenizer,
        *_end(setup, chosen, thresholds),
    ]
    return Outcome("model", tuple(findings))


def _missing(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """The loader's own list where it has one; else weights that look as if nobody had trained them."""
    policy = setup.policy
    cause = "the checkpoint's names or shapes are not the model's: what is missing starts at random"
    advice = "load the checkpoint with the class it was saved from, and check the names in its files (model.name)"
    if policy.missing:
        others = [
            f"{len(policy.unexpected)} of the checkpoint's are not the model's, such as {name}"
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
            f"{len(left)} weights of the checkpoint are not read, although the model has others of their kind, such as "
            f"{', '.join(left[:3])}",
            "the model is built smaller than the one that was saved: layers or biases that were trained are left out",
            "load the checkpoint with the config.json that it was saved with (num_hidden_layers, attention_bias)",
        )
        return
    if damage := damaged_weights(setup):
        yield finding(
            "model/missing-weights",
            *damage,
            "take the weights as they were published, and train rows of new tokens before they are asked for",
        )
        return
    names, chance = untrained_weights(setup, thresholds["travel_chance"])
    if names:
        yield finding(
            "model/missing-weights",
            f"{len(names)} weights have the statistics of a fresh initialisation, and other random numbers in their "
            f"place serve as well (chance {chance:.1g}), while the others are trained: {', '.join(names[:3])}",
            cause,
            advice,
        )


def unread(model: torch.nn.Module, unexpected: Sequence[str]) -> list[str]:
    """Weights that only the checkpoint has and that are of the model's own kind.

    Those are weights of a further layer, whose names differ from the model's by a number alone, and further weights of
    a module that has some, such as a bias. A head for another purpose, or a buffer of an old version, is neither.
    """
    names = [_WRAPPED.sub("", name) for name, _ in model.named_parameters()]
    kinds, modules = {_NUMBER.sub("#", name) for name in names}, {name.rpartition(".")[0] for name in names}
    return [name for name in unexpected if _NUMBER.sub("#", name) in kinds or name.rpartition(".")[0] in modules]


def _round_trip(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Texts of problems must come back from their tokens, and gold answers must earn as much when they do."""
    task, tokenizer = setup.run.task, setup.policy.tokenizer
    problems = task.sample(_TEXTS, seed=setup.config.run.seed, step=0)
    texts = [m["content"] for p in problems for m in messages_of(p) if m["role"] != "assistant"]
    lost = [(text, back) for text in texts if words(back := word_by_word(tokenizer, text)) != words(text)]
    gone = sum(len(set(words(text)) - set(words(back))) for text, back in lost)
    share = gone / max(1, sum(len(set(words(text))) for text in texts))
    if share > thresholds["lost_words"]:
        text, back = lost[0]
        yield tokenizer_finding(
            f"{100 * share:.0f} % of the words of {len(texts)} texts do not come back from their tokens: "
            f"{text[:50]!r} becomes {back[:50]!r}"
        )
        return
    if (together := run_together(tokenizer, texts)) and writes_blanks(setup, thresholds):
        yield tokenizer_finding(together)
        return
    options = setup.config.reward
    if task.prompts_only or task.multi_turn or options.aggregate != "sum" or options.shuffle is not None:
        return
    worse = []
    answered = [(problem, turns[-1]) for problem in problems[:4] if (turns := gold_or_none(task, problem))]
    for problem, gold in answered:
        back = _back(tokenizer, gold)
        seen = _visible(gold) != _visible(back)  # else it is the data that hold what nobody can write
        judged = [setup.built.judge.judge(problem, [[text]]) for text in (gold, back) if seen]
        earned = [rewards[0].total for rewards in judged if rewards]
        if len(earned) == 2 and earned[1] < earned[0]:
            worse.append((gold, back))
    setup.built.judge.drain()
    if worse:
        gold, back = worse[0]
        found = tokenizer_finding(
            f"{len(worse)} of {len(answered)} gold answers earn less once they were tokens: {gold[:50]!r} becomes "
            f"{back[:50]!r}"
        )
        # many tokenizers drop or add spaces: a reward that minds them may be the one at fault
        spaces = all("".join(gold.split()) == "".join(back.split()) for gold, back in worse)
        yield replace(found, severity="warning") if spaces else found


def run_together(tokenizer: Any, texts: Sequence[str]) -> str | None:
    """Evidence that words lose what parts them: texts have the tokens that they have without blanks."""
    parted = [text for text in dict.fromkeys(texts) if " " in text.strip()]
    if not parted or any(_ids(tokenizer, text) != _ids(tokenizer, text.replace(" ", "")) for text in parted):
        return None
    return (
        f"{len(parted)} texts have the tokens that they have without blanks, although the model writes blanks: "
        f"{parted[0][:50]!r} becomes {_back(tokenizer, parted[0])[:50]!r}"
    )


def writes_blanks(setup: KeelSubject, thresholds: Thresholds) -> bool:
    """Whether completions hold blanks beyond chance, and not by noise: a model that was trained without writes none."""
    tokenizer = setup.policy.tokenizer
    blanks = {i for token, i in tokenizer.get_vocab().items() if token[:1] in _BLANKS} - set(tokenizer.all_special_ids)

    def held(groups: Sequence[Group]) -> list[float]:
        return [fmean(not blanks.isdisjoint(c.tokens) for c in group.completions) for group in groups]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(held(groups), thresholds["blanks_written"]) > level(thresholds)

    groups = more_groups(setup, "model/tokenizer", lambda groups: any(held(groups)) and by_chance(groups))
    if by_chance(groups) or not golds(setup):
        return False
    return read_golds(setup).entropy <= thresholds["entropy_uniform_share"] * math.log(setup.vocabulary)


def _visible(text: str) -> str:
    """Without signs that leave no trace on a page, such as a joiner or the mark of a file's byte order."""
    return "".join(sign for sign in text if unicodedata.category(sign) != "Cf")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _back(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True))


def _relabelled(setup: KeelSubject, chosen: Sequence[Gold], thresholds: Thresholds) -> Iterator[Finding]:
    """Where gold answers surprise a sure model: it must write their tokens more often than tokens drawn at random.

    A permutation test of its mean distribution over gold texts: a model that does not know the task or the template
    still knows its alphabet.
    """
    uniform = math.log(setup.vocabulary)
    if not chosen or -fmean(read_golds(setup).logp) < thresholds["gold_surprise"] * uniform:
        return
    entropy, written = read_golds(setup).entropy, read_golds(setup).written.log()
    if entropy > thresholds["entropy_uniform_share"] * uniform:
        return  # random weights: another finding
    texts = ([t for gold in chosen for t in gold.answer], [t for gold in chosen for t in gold.prompt])
    tests = [_among_random(setup, written, tokens) for tokens in texts]
    own, others, chance = min(tests, key=lambda test: test[-1])
    if not thresholds["relabelled_chance"] < chance < 1 - thresholds["relabelled_chance"]:
        return  # it knows their alphabet, or has learned to write others: tokens at random are neither
    yield tokenizer_finding(
        f"the model writes the tokens of gold answers and prompts with a log-probability of {own:.3g} on average, and "
        f"random ones with {others:.3g} (these do as well with chance {chance:.2g}), although it is sure of what it "
        f"writes (entropy {entropy:.2g} of {uniform:.2g} nats)"
    )


def _among_random(setup: KeelSubject, written: Tensor, tokens: Sequence[int]) -> tuple[float, float, float]:
    """The mean of `written` over ordinary tokens, over others in their place, and how often those have as much."""
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


def _beyond(setup: KeelSubject, chosen: Sequence[Gold], thresholds: Thresholds) -> Iterator[Finding]:
    """What the model writes that is no token of the tokenizer's, although it is sure of what it writes."""
    if not chosen or read_golds(setup).entropy > thresholds["entropy_uniform_share"] * math.log(setup.vocabulary):
        return
    written, size = read_golds(setup).written, len(setup.policy.tokenizer)
    mass = float(written[size:].sum())
    if mass > thresholds["unknown_tokens"]:
        yield tokenizer_finding(
            f"over {len(chosen)} prompts and gold answers the model gives {100 * mass:.0f} % of its probability to "
            f"{len(written) - size} ids that are no token of the tokenizer"
        )


def _end(setup: KeelSubject, chosen: Sequence[Gold], thresholds: Thresholds) -> Iterator[Finding]:
    """What the model puts after gold answers, against the tokens that end a completion."""
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
    if others and float(after[others[0]]) > thresholds["end_share"] and ended < 1 - thresholds["end_share"]:
        yield _end_token(
            f"after {len(chosen)} gold answers the model writes {names[others[0]]} with probability "
            f"{float(after[others[0]]):.2g}, which ends no completion, and {', '.join(names[i] for i in ends)} with "
            f"{ended:.2g}",
            "the tokenizer's eos_token and the generation config do not name the token that ends the model's turns",
        )
        return
    turns = [turn.completion for turn in setup.turns if turn.completion.tokens]
    for token in sorted(set(ends) - special - set(added)):
        stopped = sum(completion.tokens[-1] == token for completion in turns)
        if stopped > 1 and float(after[token]) < 1 - thresholds["end_share"]:
            yield _end_token(
                f"{stopped} of {len(turns)} turns end at {names[token]}, which is no special token, and after gold "
                f"answers the model writes it with probability {float(after[token]):.2g}",
                "an ordinary token ends completions in the middle of what the model has to say",
            )
            return


def _end_token(evidence: str, cause: str) -> Finding:
    return finding(
        "model/end-token",
        evidence,
        cause,
        "set eos_token_id in the model's generation config (and eos_token of the tokenizer) to the token that ends its "
        "turns; rollout.stop can name its text meanwhile",
    )
