"""The configured system prompt: a model that does not know it answers as if it had been asked something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from keel.base.types import Problem
from keel.doctor.findings import Finding, Options, finding, propose
from keel.doctor.probes.earnings import Earned, earned_otherwise
from keel.doctor.probes.evidence import level
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise
from keel.doctor.probes.rendering import template_name
from keel.doctor.probes.templates import PROBLEMS, SHARED, of_gains, template_golds, with_data
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.run.build import build_renderer

SHOWN = 60
TESTING = 128  # problems
LIKELY = 0.05  # the chance of what completions earn over which it says nothing


@dataclass(frozen=True)
class Unasked:
    """How much likelier gold answers are without the system prompt, what completions earn, and the options for it."""

    gain: float  # nats a token
    problems: int
    chance: float
    earned: Earned
    options: Options


def system_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """A system prompt after which the model neither knows nor gives the answers that it has without it."""
    found, text = better_unasked(setup, thresholds), setup.config.data.system_prompt
    if found is None or text is None:
        return
    setup.shared["another template"] = "without the system prompt"
    yield finding(
        "prompt/format",
        f"gold answers are {found.gain:.2g} nats a token likelier without data.system_prompt={text[:SHOWN]!r} "
        f"({found.problems} problems, chance {found.chance:.1g}), and completions earn {found.earned}",
        "the model was not trained behind this system prompt, and takes it for something else than an instruction"
        if "data.chat_template" in found.options or setup.config.data.chat_template != "auto"
        else "the model was not trained behind this system prompt, nor in the chat template that it brings with it",
        propose(
            "set {}, or the one that the model was trained with"
            + ("" if found.earned.sure else "; nothing, if it asks for what gold answers do not show"),
            found.options,
        ),
        severity=None if found.earned.sure else "warning",
    )


def better_unasked(setup: ProbeSetup, thresholds: Thresholds) -> Unasked | None:
    """Measured once; None without a system prompt, or where the model does as well with it.

    A prompt that asks for thoughts or a form makes bare answers less likely as well: then completions do not earn more
    without it. Rewards of elsewhere are not asked for it.
    """
    if "unasked" not in setup.shared:
        setup.shared["unasked"] = _measured(setup, thresholds)
    found: Unasked | None = setup.shared["unasked"]
    return found


def _measured(setup: ProbeSetup, thresholds: Thresholds) -> Unasked | None:
    if setup.config.data.system_prompt is None or setup.failures or setup.built.judge.remote:
        return None
    tokenizer, ways = setup.policy.tokenizer, list[dict[str, Any]]([{"data.system_prompt": None}])
    if setup.config.data.chat_template == "auto":  # which leaves texts plain where there is no system prompt
        ways.insert(0, {"data.system_prompt": None, "data.chat_template": template_name(tokenizer)})

    def gains(options: Options, golds: Sequence[tuple[Problem, Gold]]) -> tuple[list[float], list[float]]:
        other = build_renderer(with_data(setup.config, options), tokenizer)
        asked = answer_logp(setup, [gold for _, gold in golds])
        unasked = answer_logp(setup, [Gold(other.prompt(problem), gold.answer) for problem, gold in golds])
        return asked, unasked

    own = build_renderer(setup.config, tokenizer)
    first = template_golds(setup, own)
    if len(first) < PROBLEMS // 2:
        return None
    gained, options = max(((_gained(*gains(way, first)), way) for way in ways), key=lambda pair: pair[0])
    if not gained > thresholds["template_gain"]:
        return None
    plain = with_data(setup.config, options)
    golds = template_golds(setup, own, TESTING)[len(first) :] or first  # where it promises something, others test it
    asked, unasked = gains(options, golds)
    gain, blind = _gained(asked, unasked), blind_surprise(setup, thresholds)
    chance = of_gains([after - before for before, after in zip(asked, unasked, strict=True)])
    if not gain > thresholds["template_gain"] or chance > level(thresholds) / SHARED:
        return None
    if -fmean(asked) <= blind or -fmean(unasked) >= blind:
        return None
    earned = earned_otherwise(setup, plain, thresholds)
    if earned is None or not earned.other > earned.own or earned.chance > LIKELY:
        return None
    return Unasked(gain, len(golds), chance, earned, options)


def _gained(before: Sequence[float], after: Sequence[float]) -> float:
    return fmean(after) - fmean(before)
