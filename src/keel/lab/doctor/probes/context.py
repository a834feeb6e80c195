"""Whether an engine has more before its tokens than the prompt that it is given, whatever that may be.

Two experiments without a guess at the text. After a prompt of one token nothing but the weights decides what comes
first: one key has the whole attention at any position, in any cache. With weights whose attention gives nothing out the
last token alone decides, at any place. Who is off in the first and right in the second has the right weights,
temperature and reports, and another text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from keel.base.thresholds import Thresholds
from keel.base.types import Completion
from keel.lab.doctor.probes.draws import Draws, unfiltered
from keel.lab.doctor.probes.gap import average, closed, largest
from keel.lab.doctor.setup import ProbeSetup
from keel.lab.doctor.weights import backup
from keel.rollout.request import Request

Prompts = Sequence[tuple[int, ...]]
Score = Callable[[Prompts, list[tuple[Completion, int]]], Draws]  # turns and the numbers of their prompts

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_STEP = 3_000_017  # noise of its own
_SINGLE, _SAMPLES, _LENGTH = 8, 4, 8  # prompts of one token, completions a prompt, tokens of each


def added_text(setup: ProbeSetup, gap: float, score: Score, thresholds: Thresholds) -> str | None:
    """Evidence that it has, where what it reports is off by `gap` nats on average; None where something else is."""
    limit = closed(setup, gap)
    prompts = [group.prompt_tokens for group in setup.groups]
    single = [(token,) for token in sorted({token for prompt in prompts for token in prompt})[:_SINGLE]]
    begun = _continue(setup, single, 1)
    first = _off(setup, score(single, begun)) if begun else torch.nan
    if not first > max(10 * limit, thresholds["scoring_gap"]):
        return None
    engine, model = setup.run.engine, setup.policy.model
    try:
        with without_attention(setup):
            engine.sync(model, 3)
            turns = _continue(setup, prompts, _LENGTH)
            drawn, shorter = score(prompts, turns), score([prompt[len(prompt) // 2 :] for prompt in prompts], turns)
            plain = unfiltered(setup.sampling)
            blind = largest(drawn.logp(plain) - shorter.logp(plain)) <= thresholds["scoring_gap"]
            left = _off(setup, drawn)
    finally:
        engine.sync(model, 4)
    if not blind or not left <= limit:
        return None
    return (
        f"the engine's log-probabilities are off by {gap:.3g} nats on average, by {first:.3g} after prompts of one "
        f"token, and by {left:.1g} with weights whose attention gives nothing out: the other weights and the reports "
        "are right; more stands before the tokens than the prompt, unless attention's own weights or cache are others"
    )


def _continue(setup: ProbeSetup, prompts: Prompts, length: int) -> list[tuple[Completion, int]]:
    requests = [Request(f"context {i}", tuple(prompt), max_new=length) for i, prompt in enumerate(prompts)]
    sampling = replace(setup.sampling, num_generations=_SAMPLES)
    turns = setup.run.engine.generate(requests, sampling, seed=setup.config.run.seed, attempt=0, step=_STEP)
    setup.run.engine.release()
    return [(completion, i) for i, completions in enumerate(turns) for completion in completions if completion.tokens]


def _off(setup: ProbeSetup, drawn: Draws) -> float:
    reported = drawn.where(~drawn.sample_logp.isnan())
    return average(reported.sample_logp - reported.logp(unfiltered(setup.sampling))) if len(reported) else torch.nan


@contextmanager
def without_attention(setup: ProbeSetup) -> Iterator[None]:
    """The policy with nothing coming out of its attention; afterwards every weight has the very bits it had."""
    outputs = [parameter for name, parameter in setup.policy.model.named_parameters() if _is_output(name)]
    originals = backup(outputs)
    try:
        with torch.no_grad():
            for parameter in outputs:
                parameter.zero_()
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(outputs, originals, strict=True):
                parameter.copy_(before)


def _is_output(name: str) -> bool:
    """Whether a weight, or an adapter's, is of the last map of an attention layer."""
    parts = name.split(".")
    attention = [i for i, part in enumerate(parts) if "attn" in part or "attention" in part]
    return bool(attention) and any(part in _OUTPUTS for part in parts[attention[0] + 1 :])
