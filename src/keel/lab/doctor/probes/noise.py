"""The engine's noise: the same for the same seed and step, another for every other step and sample."""

from __future__ import annotations

from collections.abc import Iterator

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.setup import ProbeSetup

NOISE_STEP = 1_000_003  # a step that no run reaches: other noise than training's first steps


def noise_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Equal seeds must draw alike, other steps and other completions must not."""
    problems = [group.problem for group in setup.groups]
    same, other = setup.collect(problems), setup.collect(problems, step=NOISE_STEP)
    drawn = [[c.tokens for c in group.completions] for group in setup.groups]
    again = [[c.tokens for c in group.completions] for group in same]
    later = [[c.tokens for c in group.completions] for group in other]
    logp = setup.scores().logp[setup.mask]
    certain = (
        float(-logp.mean()) * setup.batch.width < thresholds["sure_of_itself"]
    )  # a model this sure may well repeat itself
    if later == drawn and not certain:
        yield finding(
            "sampler/noise",
            f"all {sum(map(len, drawn))} completions of two different steps are the same tokens",
            "the engine ignores seed and step: every step draws the same noise",
            "key the engine's noise by seed, attempt, step, problem and sample",
        )
    elif all(len(set(group)) == 1 for group in drawn) and not certain:
        yield finding(
            "sampler/noise",
            f"the completions of each of {len(drawn)} groups are copies of each other",
            "the engine ignores the sample's number, or decodes greedily",
            "draw each completion of a group with noise of its own at rollout.temperature",
        )
    elif again != drawn:
        yield finding(
            "sampler/noise",
            "the same seed, step and problems gave other tokens a second time",
            "the engine's noise or its kernels depend on more than the seed",
            "nothing has to change for training; a run cannot be repeated or resumed exactly",
            severity="note",
        )
