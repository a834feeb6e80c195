"""The suspects of two investigations as data: what confirms each, and what it takes to rule it out.

H01 to H08 are those of a multi-hop run that did not learn; E01 to E06 are the links of the chain by which a chess run
blew up. Figures are those of the preflight's probes (`probe/figure`) or of a run's history (`reward/mean`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keel.lab.doctor.findings import Advice

Side = Literal["at least", "at most"]


@dataclass(frozen=True)
class Clear:
    """A way out of suspicion: every figure is there, and on the safe side of its threshold (a name, or a number).

    `words` says the first figure.
    """

    words: str
    figures: tuple[tuple[str, Side, str | float], ...]


def clear(words: str, *figures: tuple[str, Side, str | float]) -> Clear:
    """A way out, written shortly."""
    return Clear(words, figures)


@dataclass(frozen=True)
class Suspect:
    """One suspect: the codes that confirm it and the ways to clear it, any one of which is enough.

    `over` and `under` name a figure and a threshold beyond which the row is confirmed without a finding. A code of
    `needs` that could not be checked keeps the row from being ruled out.
    """

    name: str
    title: str
    priority: str
    codes: tuple[str, ...]
    clears: tuple[Clear, ...]
    interacts: str
    if_confirmed: str | Advice | None  # None: what the finding that confirms it advises
    if_ruled_out: str
    to_test: str = "run keel doctor on the configuration"
    over: tuple[tuple[str, str], ...] = ()
    under: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    by_formula: bool = False  # what the configured KL term is decides, where it is known


NOT_AMPLIFIED = (
    clear(
        "differences of reward are multiplied by at most {:.3g}",
        ("advantage/amplification_max", "at most", "advantage_amplification"),
    ),
    clear(
        "rewards are not divided by their deviation (advantage/divides {:.0f})",
        ("advantage/divides", "at most", 0.0),
    ),
    clear("mean within-group std {:.3g}", ("reward/within_group_std", "at least", "reward_spread")),
)

SUSPECTS: tuple[Suspect, ...] = (
    Suspect(
        "H01",
        "advantage scaling",
        "high",
        ("advantage/amplified",),
        NOT_AMPLIFIED,
        "amplifies H03 (the KL term has to hold against it) and noise of H05",
        None,
        "leave loss.scale_rewards as it is",
        to_test="needs rewards that differ within a group: see H05",
    ),
    Suspect(
        "H02",
        "token masking",
        "high",
        ("mask/attention", "mask/not-actions", "mask/end", "scoring/positions"),
        (
            clear(
                "{:.0f} tokens trained, and of what the engine samples in a turn none is left out",
                ("masks/trained_tokens", "at least", 1.0),
                ("masks/left_out_of_turns", "at most", 0.0),
            ),
        ),
        "hides as a ratio of exactly 1; looks like H05 and H07",
        "mend the mask: loss mask and attention mask are two tensors",
        "none: the prompt is seen, and what was sampled is trained",
        to_test="look at the coloured masks of keel doctor on the configuration: is what is read only not sampled?",
    ),
    Suspect(
        "H03",
        "KL formula and direction",
        "medium",
        ("kl/reversed", "kl/no-gradient", "kl/scale", "reference/wrong", "reference/adapter-on", "reference/moving"),
        (
            clear(
                "cosine {:.3f} to the exact ∇KL(policy‖ref)",
                ("kl_term/cosine", "at least", "kl_gradient_cosine"),
                ("reference/kl_at_start", "at most", "kl_at_start"),
            ),
        ),
        "amplified by H01: fix that first, then test this alone",
        None,
        "leave the formula; turn kl.beta if the share of the gradient is wrong",
        over=(("kl/at_start", "kl_at_start"), ("reference/kl_at_start", "kl_at_start")),
        needs=("kl/reversed", "kl/no-gradient"),
        by_formula=True,
    ),
    Suspect(
        "H04",
        "context truncation",
        "medium",
        ("prompt/truncated", "output/truncated"),
        (
            clear(
                "{:.0%} of completions end at the limit",
                ("truncation/completions_cut", "at most", "near_limit"),
                ("truncation/prompts_near_limit", "at most", "near_limit"),
            ),
            clear("{:.0%} of completions end at the limit", ("length/truncated_fraction", "at most", "near_limit")),
        ),
        "cuts answers off, so that H05 sees no difference; grows with the turns of H07",
        "raise rollout.max_completion_length or data.max_prompt_length",
        "none",
        over=(
            ("truncation/completions_cut", "near_limit"),
            ("truncation/prompts_near_limit", "near_limit"),
            ("length/truncated_fraction", "near_limit"),
        ),
    ),
    Suspect(
        "H05",
        "weak reward",
        "high",
        ("reward/weak", "reward/constant", "reward/cliff", "reward/non-finite"),
        (
            clear("mean within-group std {:.3g}", ("collection/within_group_std", "at least", "reward_spread")),
            clear("mean within-group std {:.3g}", ("reward/within_group_std", "at least", "reward_spread")),
        ),
        "what it leaves is what H01 divides by",
        "pay for parts of the answer, or choose problems that are solved sometimes",
        "none: rewards differ within groups",
        to_test="look at more steps: too few groups have differed to call the reward strong or weak",
    ),
    Suspect(
        "H06",
        "weight sync",
        "high",
        ("sampler/stale",),
        (
            clear(
                "the synced engine is within {:.2g} nats of the changed weights",
                ("weight sync/gap_new", "at most", "scoring_gap_half"),
                ("weight sync/gap_old", "at least", "scoring_gap_half"),
                ("weight sync/log_ratio", "at least", 0.0),
            ),
            clear(
                "KL(sampler‖policy) is {:.2g} nats per token, far less than the policy has moved",
                ("kl/sampler_policy/k3/mean", "at most", "sampler_kl_warning"),
                ("sampler/left_behind", "at most", "sampler_left_behind"),
            ),
        ),
        "an old sampler makes every KL and ratio wrong (H03)",
        "call the engine's sync after every update, adapters included",
        "none: the engine follows the policy",
    ),
    Suspect(
        "H07",
        "multi-turn handling",
        "medium",
        (),
        (clear("{:.0f} tokens of the environment, none of them trained", ("masks/tool_tokens", "at least", 1.0)),),
        "is H02 where tools speak; lengthens H04",
        "mend the task's respond, or the mask of its messages",
        "none",
        to_test="run keel doctor with rollout.max_turns over 1 and a task that responds",
    ),
    Suspect(
        "H08",
        "evaluation against training",
        "low",
        ("eval/train-gap",),
        (clear("{:.0f} prompts are the same tokens by both paths", ("evaluation/same_prompts", "at least", 1.0)),),
        "makes a cure of any other row invisible",
        "render both by the same template and judge both by the same reward",
        "none",
    ),
    Suspect(
        "E01",
        "explosion chain: random weights",
        "high",
        ("output/random-weights",),
        (
            clear("entropy is {:.0%} of uniform", ("collection/entropy_share", "at most", "entropy_uniform_share")),
            clear("entropy is {:.0%} of uniform", ("entropy/share", "at most", "entropy_uniform_share")),
        ),
        "leads to E02",
        "load trained weights (model.name), or add a warmstart",
        "none: the model has been trained",
    ),
    Suspect(
        "E02",
        "explosion chain: unparseable output",
        "high",
        ("output/unparseable",),
        (
            clear("{:.0%} parse", ("collection/parse_rate", "at least", "parse_rate_warning")),
            clear("{:.0%} parse in the first steps", ("parse/first_steps", "at least", "parse_rate_warning")),
        ),
        "from E01; leads to E03",
        "add a warmstart on the task, and a reward for the form",
        "none",
        under=(("parse/first_steps", "parse_rate_warning"),),
    ),
    Suspect(
        "E03",
        "explosion chain: reward cliff",
        "high",
        ("reward/cliff",),
        (
            clear("the lowest reward of a recorded completion is {:.3g}", ("reward/lowest", "at least", 0.0)),
            clear("{:.0%} parse, so most do not fail", ("collection/parse_rate", "at least", "cliff_parsed")),
            clear("{:.0%} parse, so most do not fail", ("parse/first_steps", "at least", "cliff_parsed")),
        ),
        "from E02; leads to E04",
        "raise the penalty for malformed output towards 0 and pay in grades",
        "none",
        to_test="look at the rewards: what malformed output earns, and how many completions earn that",
    ),
    Suspect(
        "E04",
        "explosion chain: amplified advantages",
        "high",
        ("advantage/amplified",),
        NOT_AMPLIFIED,
        "from E03 (the lone survivor of a group); is H01; leads to E05",
        None,
        "none",
        to_test="needs rewards that differ within a group: see H05",
    ),
    Suspect(
        "E05",
        "explosion chain: learning rate",
        "high",
        ("optim/lr-too-high", "optim/spike"),
        (
            clear(
                "{:.2g} nats per token in one update",
                ("update/kl_after", "at most", "kl_per_update"),
                ("update/kl_after_peak", "at most", "kl_per_update_peak"),
            ),
            clear(
                "at most {:.2g} nats per token in one of the first updates",
                ("update/largest_move", "at most", "kl_per_update"),
            ),
        ),
        "from E04; leads to E06",
        "lower optim.learning_rate, raise optim.warmup_steps",
        "none",
        needs=("optim/lr-too-high",),
    ),
    Suspect(
        "E06",
        "explosion chain: KL explosion",
        "high",
        ("kl/explosion", "kl/at-start", "optim/non-finite", "kl/over-budget"),
        (
            clear(
                "largest KL of a step {:.3g} nats per token", ("kl/policy_ref/k3/max", "at most", "kl_explosion_floor")
            ),
        ),
        "from E05, or alone from dropout or a wrong reference (H03)",
        "cure the first confirmed link above; raising the alarm cures nothing",
        "none",
        to_test="one update cannot show it: run keel doctor on the run",
        needs=("kl/explosion",),
    ),
)
