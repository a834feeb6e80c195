"""Alternative sampling distributions are recognised on tokens drawn from them, and not on the policy's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doctor.schooled import schooled_config
from keel.doctor.draws import Draws, tail_masses, tightest, uniform_p_value
from keel.doctor.probes.alternatives import alternatives, applied, configured_finding, filter_odds
from keel.doctor.thresholds import load_thresholds
from keel.rollout.sampling import SamplingParams

PLAIN, END = SamplingParams(), 0
PROMPT = 5
Edit = Callable[[Sequence[int], Any], dict[int, float]]  # text so far, logits → new logits of some tokens


def repetition(penalty: float) -> Edit:
    return lambda text, logits: {
        t: float(logits[t]) / penalty if logits[t] > 0 else float(logits[t]) * penalty for t in text
    }


def frequency(penalty: float, *, once: bool = False) -> Edit:
    return lambda text, logits: {
        t: float(logits[t]) - penalty * (1 if once else text[PROMPT:].count(t)) for t in text[PROMPT:]
    }


def no_end(least: int) -> Edit:
    return lambda text, logits: {END: -math.inf} if len(text) - PROMPT < least else {}


def on_token(token: int, bias: float) -> Edit:
    return lambda text, logits: {token: float(logits[token]) + bias}


def written(edit: Edit | None = None, texts: int = 120, length: int = 20, vocabulary: int = 24, seed: int = 0) -> Draws:
    """Texts of a first-order Markov chain after prompts of five tokens, with logits changed by `edit`."""
    generator = torch.Generator().manual_seed(seed)
    chain = 1.2 * torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    chain[:, END] += 0.3
    rows, logits, tokens, positions = [], [], [], []
    lines = []
    for row in range(texts):
        line = torch.randint(1, vocabulary, (PROMPT,), generator=generator).tolist()
        for position in range(length):
            own = chain[line[-1]]
            changed = own.clone()
            for token, value in (edit(line, own) if edit else {}).items():
                changed[token] = value
            token = int(torch.multinomial(changed.softmax(-1), 1, generator=generator))
            rows.append(row)
            logits.append(own)
            tokens.append(token)
            positions.append(position)
            line.append(token)
            if token == END:
                break
        lines.append(tuple(line))
    return Draws(
        torch.stack(logits),
        torch.tensor(tokens),
        torch.zeros(len(tokens)),
        torch.tensor(rows),
        position=torch.tensor(positions),
        texts=tuple(lines),
        prompts=(PROMPT,) * texts,
    )


def test_none_is_found_on_the_policys_own_draws() -> None:
    for seed in range(12):
        assert alternatives(written(seed=seed), PLAIN, [END])[1] < -math.log(1e-3)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("a repetition penalty of 1.5", repetition(1.5)),
        ("a presence penalty of 1", frequency(1.0, once=True)),
        ("a frequency penalty of 1", frequency(1.0)),
        ("no end before 6 tokens", no_end(6)),
        ("a ban on token 3", on_token(3, -math.inf)),
        ("a bias of +3 on token 3", on_token(3, 3.0)),
    ],
)
def test_each_is_found_again_and_is_the_likeliest(name: str, edit: Edit) -> None:
    drawn = written(edit)
    others, odds = alternatives(drawn, PLAIN, [END])
    assert odds > -math.log(1e-6)
    assert others[0].name.startswith(name)
    gain = float((applied(drawn, others[0], PLAIN).logp(PLAIN) - drawn.logp(PLAIN)).sum())
    assert others[0].gain == pytest.approx(gain, rel=1e-9)  # found by the tokens that it touches, checked on all
    assert uniform_p_value(tail_masses(applied(drawn, others[0], PLAIN), PLAIN)) > 0.01


def test_the_tightest_filter_is_the_one_that_was_on() -> None:
    drawn = written()
    for params in (replace(PLAIN, top_p=0.83), replace(PLAIN, top_k=5), replace(PLAIN, min_p=0.07)):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.multinomial(drawn.distribution(params).exp(), 1, generator=generator).squeeze(-1)
        filtered = replace(drawn, tokens=tokens)
        explained = [p for _, p in tightest(filtered, PLAIN) if uniform_p_value(tail_masses(filtered, p)) > 0.01]
        changed = [name for name in ("top_p", "top_k", "min_p") if getattr(params, name) != getattr(PLAIN, name)]
        assert any(getattr(p, changed[0]) == pytest.approx(getattr(params, changed[0]), rel=0.1) for p in explained)


def test_nothing_is_found_where_tokens_were_left_out() -> None:
    drawn = written(texts=400).without([3, 5])
    assert not {3, 5} & set(drawn.tokens.tolist())
    assert alternatives(drawn, PLAIN, [END])[1] < -math.log(1e-3)
    assert uniform_p_value(tail_masses(drawn, PLAIN)) > 0.01


def test_tokens_that_are_all_alike_let_no_filter_be_fitted() -> None:
    tokens = torch.randint(0, 119, (2000,), generator=torch.Generator().manual_seed(0))
    alike = Draws(torch.zeros(2000, 119, dtype=torch.float64), tokens, tokens.double(), tokens)
    assert filter_odds(alike, PLAIN) < 1.0
    pairs = alike.logits + torch.arange(119) // 2 / 10  # two of each
    for params in (replace(PLAIN, top_k=5), replace(PLAIN, top_p=0.9), replace(PLAIN, min_p=0.1)):
        filtered = replace(alike, logits=pairs).distribution(params)
        picked = torch.multinomial(filtered.exp(), 1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
        own = replace(alike, logits=pairs, tokens=picked)
        gain = float((own.logp(params) - own.logp(PLAIN)).sum())
        assert filter_odds(own, PLAIN) == pytest.approx(gain, abs=math.log(100))


def test_a_token_that_the_configured_filter_excludes_is_left_out_of_its_figures() -> None:
    """The mass that top_k=5 removes, and its −log(1 − mass), averaged over the tokens that it permits."""
    params = replace(PLAIN, top_k=5)
    drawn = written(texts=20)
    ranked = drawn.logits.sort(descending=True)
    tokens = ranked.indices[:, 0].clone()
    tokens[0] = ranked.indices[0, 5]  # the first one that is excluded
    kept = drawn.logits.softmax(-1).sort(descending=True).values[1:, :5].sum(-1)
    setup: Any = SimpleNamespace(
        thresholds=load_thresholds(), sampling=params, config=schooled_config("rollout.top_k=5")
    )
    found = configured_finding(setup, replace(drawn, tokens=tokens))
    assert f"{100 * float((1 - kept).mean()):.1f} %" in found.evidence
    assert f"{float(-kept.log().mean()):.3g} nats" in found.evidence
    assert found.severity != "note"
