"""What can be found: one row a code, worst first, each with what it means and how it is decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.base.errors import unknown

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


Options = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """What to change: words with a `{}` for every proposal, each of which is options to set together.

    Proposals are data, so that a test can follow them; any of them alone is worth trying.
    """

    words: str
    proposals: tuple[Options, ...] = ()

    def __str__(self) -> str:
        if not self.proposals:
            return self.words
        return self.words.format(*(" ".join(map(_typed, overrides(options))) for options in self.proposals))


def propose(words: str, *proposals: Options) -> Advice:
    """An advice, written shortly."""
    return Advice(words, proposals)


def _typed(word: str) -> str:
    """As a shell takes it for one word."""
    return f"'{word}'" if " " in word else word


def overrides(options: Options) -> tuple[str, ...]:
    """Options as one types them: `kl.beta=0.1` of Keel's, `beta=0.1` of a trainer that is configured in Python."""
    from keel.config.text import dump

    def value(name: str, given: Any) -> str:
        if isinstance(given, float):
            return f"{given:g}"
        return dump(given) if "." in name else repr(given)

    return tuple(f"{name}={value(name, given)}" for name, given in options.items())


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the figures and steps that show it, the likely cause, the exact option to change.

    `options` are the advice's proposals as overrides, one tuple for each.
    """

    code: str
    severity: Severity
    evidence: str
    cause: str
    advice: str
    options: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Code:
    """What a code means, how it is decided, how bad it is unless the evidence says otherwise, its place among equals.

    `rank` puts causes before their symptoms: of two errors the one with the lower rank is named first.
    """

    name: str
    meaning: str
    decided: str
    severity: Severity
    rank: int


# name: (severity, meaning, how it is decided). In order: what breaks other things stands before what it breaks.
_ROWS: tuple[tuple[str, Severity, str, str], ...] = (
    (
        "device/placement",
        "error",
        "Parts of the run lie on different devices, or a part is not where it was asked for.",
        "Preflight lists the device of every parameter of policy and reference and of the engine's weights.",
    ),
    (
        "reward/non-finite",
        "error",
        "A reward is NaN or infinite, and so is every advantage of its group.",
        "A reward of a collected completion, or a reward metric of a step, is not a finite number.",
    ),
    (
        "reward/failed",
        "error",
        "A reward raises, returns something that is no number, or does not return.",
        "Preflight judges one batch; a call of a reward or of the environment gave no value. In a run: events say "
        "so; a warning if they are of at most `skipped_share` of the steps.",
    ),
    (
        "mask/attention",
        "error",
        "The training pass cannot see the prompt or a tool's output: a loss mask serves as the attention mask.",
        "Preflight changes a prompt (or tool) token; the completion's log-probabilities must change, and do not.",
    ),
    (
        "scoring/non-finite",
        "error",
        "Log-probabilities are NaN or infinite before anything was trained.",
        "Preflight scores one batch.",
    ),
    (
        "scoring/dropout",
        "error",
        "The policy is scored with dropout on: the same tokens get other log-probabilities each time.",
        "Preflight scores one batch twice; the passes differ, and agree once every dropout layer is off. In a run: "
        "its options leave dropout on, and the KL before the first update is above `kl_at_start`.",
    ),
    (
        "scoring/positions",
        "error",
        "Position ids do not count the real tokens, as under left padding without corrected positions.",
        "Preflight scores a completion alone and beside a longer one; the log-probabilities differ with the padding.",
    ),
    (
        "scoring/shifted",
        "error",
        "Log-probabilities are taken from the logits of a neighbouring place, or of a text that was shortened.",
        "Preflight compares them with the model's own forward: they equal those one place before or after, or after a "
        "prompt without its first token, or all but the last of each completion are right.",
    ),
    (
        "scoring/temperature",
        "error",
        "Training's log-probabilities are not taken at the sampling temperature.",
        "Preflight compares them with the model's own forward: the gap closes at another temperature.",
    ),
    (
        "scoring/mismatch",
        "error",
        "Training's log-probabilities are not the model's, and no known cause explains it.",
        "Preflight compares them with the model's own forward: over `scoring_gap` (16 bits: `scoring_gap_half`).",
    ),
    (
        "scoring/gradient",
        "error",
        "Training's log-probabilities have the right values and the wrong gradient: weights are left out.",
        "Preflight differentiates them and the model's own forward by every trainable weight.",
    ),
    (
        "scoring/nondeterministic",
        "warning",
        "Two scoring passes over the same tokens disagree although no dropout is on.",
        "Preflight scores one batch twice; the largest difference is over `scoring_difference`.",
    ),
    (
        "mask/not-actions",
        "error",
        "Tokens that the policy did not sample are trained, or tokens that it sampled are not.",
        "Preflight takes ∂loss/∂logp: it must be exactly zero outside the tokens that the engine sampled. Every token "
        "of a single turn must be an action; runs that the policy draws with a chance under `foreign_chance` may not.",
    ),
    (
        "mask/end",
        "error",
        "The end token is stripped, not trained, or followed by more text that is trained.",
        "Preflight looks at what the engine returns for one request: with stop_reason eos the last token must be "
        "an end token and an action, and none may stand before it.",
    ),
    (
        "loss/sign",
        "error",
        "The loss pushes tokens against their advantage, or does not ask for its sign.",
        "Preflight takes ∂loss/∂logp at ratio 1 and β = 0 for advantages of both signs: over `loss_wrong_way` of "
        "the tokens go the wrong way.",
    ),
    (
        "loss/no-gradient",
        "error",
        "The loss does not train tokens that have an advantage: it is detached, or advantages are cut off.",
        "Preflight takes ∂loss/∂logp at ratio 1 and β = 0: zero on over `loss_dead_tokens` of the tokens of "
        "either sign.",
    ),
    (
        "loss/scale",
        "error",
        "The loss has another size than its reduction says, as one multiplied by the number of tokens.",
        "Preflight divides ∂loss/∂logp by −A × the reduction's weight: the median is beyond `loss_factor` times "
        "1. A note where it is uneven by over `loss_uneven`.",
    ),
    (
        "reference/wrong",
        "error",
        "The reference is not the checkpoint that the policy started from.",
        "Preflight compares parameter count, fingerprint and log-probabilities with the policy's at step 0.",
    ),
    (
        "reference/adapter-on",
        "error",
        "The reference is scored with the policy's adapter on, so KL is 0 whatever the policy does.",
        "Preflight perturbs the adapter; the reference's log-probabilities move with it.",
    ),
    (
        "reference/moving",
        "error",
        "The reference changes although it should be frozen, or stays although it should move.",
        "Preflight perturbs the policy and takes updates; the reference's fingerprint and log-probabilities are "
        "compared before and after.",
    ),
    (
        "reference/follows",
        "warning",
        "The reference takes the policy over at every step, so that the KL stays near 0 and holds nothing.",
        "Preflight perturbs the policy and calls update() once: under `reference_follows` of the KL is left.",
    ),
    (
        "reference/not-saved",
        "warning",
        "A reference of one's own is another one after a resume or a rollback.",
        "Preflight saves it, builds it anew beside a perturbed policy, loads it, and compares the weights' "
        "fingerprints.",
    ),
    (
        "sampler/temperature",
        "error",
        "The sampler's log-probabilities are not taken at the sampling temperature.",
        "Preflight recomputes them at other temperatures: the gap closes at one that is not rollout.temperature.",
    ),
    (
        "sampler/filter",
        "error",
        "The sampler draws after top-p, top-k, min-p or a repetition penalty, the trainer computes before them.",
        "Preflight recomputes log-probabilities and the chance of the drawn tokens under the filters "
        "(`sampler_draws`). Configured ones: a warning over `sampler_kl_warning`, else a note. Log: see the advice.",
    ),
    (
        "sampler/stale",
        "error",
        "The sampler does not run the trainer's weights: they are never, or not completely, synced.",
        "Preflight changes the weights and syncs: the engine does not change with them. In a log: KL(sampler‖policy) "
        "is over `sampler_gap_growth` times that of the first step (or `sampler_rounding`), and over "
        "`sampler_kl_warning` or `sampler_never_synced` times KL(policy‖reference).",
    ),
    (
        "sampler/mismatch",
        "error",
        "What the sampler reports or draws is not the policy's, and no known cause explains it.",
        "Preflight recomputes the reported log-probabilities, and tests the drawn tokens against the policy's "
        "distribution.",
    ),
    (
        "sampler/noise",
        "error",
        "The engine's noise is not keyed by seed, step and sample: steps or completions repeat each other.",
        "Preflight samples the same problems at the same and at another step. A note if equal seeds do not repeat.",
    ),
    (
        "sampler/precision",
        "warning",
        "Sampler and trainer run the same weights in different precision or kernels, and it shows.",
        "The gap is there from the first step and does not grow, and KL(sampler‖policy) is over `sampler_kl_warning`. "
        "Preflight: it is at most `precision_times` that of bfloat16 and moves `precision_moved` of the tokens.",
    ),
    (
        "kl/reversed",
        "error",
        "The KL term's gradient points elsewhere than along ∇KL(policy‖reference) or ∇KL(reference‖policy).",
        "From the configuration by the table of proven pairings; in preflight by summing over the vocabulary.",
    ),
    (
        "kl/no-gradient",
        "error",
        "The KL term's expected gradient is zero: it costs time and regularises nothing.",
        "From the configuration by the table of proven pairings; in preflight by summing over the vocabulary.",
    ),
    (
        "kl/controller",
        "error",
        "The controller gives a β that is no coefficient: negative, not finite, without bound, or always 0.",
        "Preflight runs it for 200 updates on series of small, usual and huge KL with gaps in them; over "
        "`controller_beta` is no bound. A warning where it holds 0.",
    ),
    (
        "output/random-weights",
        "error",
        "The model writes noise: its weights are random or were not loaded.",
        "Mean entropy is over `entropy_uniform_share` of ln(vocabulary), that of drawing tokens blindly. Preflight: "
        "gold answers also surprise the model that much.",
    ),
    (
        "prompt/format",
        "error",
        "The prompt's format or the tokenizer does not fit the model.",
        "Preflight: gold answers surprise the model as much as blind guessing and under `parse_rate_misfit` of "
        "the output can be read, while its entropy is under `entropy_uniform_share`: it is sure, and of "
        "something else.",
    ),
    (
        "reward/gold",
        "error",
        "The gold answer earns less than what the model writes.",
        "Preflight judges the gold answers of its problems by the configured rewards. A warning if they beat some "
        "of them.",
    ),
    (
        "tool/failing",
        "error",
        "Most calls of tools are answered with an error, so episodes never get what they ask for.",
        "The share of failed calls is over `tool_errors` over the last steps; a warning up to `tool_errors_error`.",
    ),
    (
        "reward/cliff",
        "error",
        "Failing costs far more than anything else can earn, so a rare success or failure rules the update.",
        "The lowest reward is negative, over `cliff_share` of the completions get it, most cannot be read, and the "
        "next one is `cliff_gap` and `reward_cliff` times the spread of all others above it. Preflight: "
        "`reward_cliff_share` earn a negative value of `reward_cliff_penalty` of a right answer's size, or one is "
        "`reward_cliff_depth` times that size.",
    ),
    (
        "output/truncated",
        "error",
        "Completions end at the length limit instead of by themselves, so their reward judges a torso.",
        "The truncated share is over `truncated_completions`; an error from `truncated_completions_error` on.",
    ),
    (
        "prompt/truncated",
        "warning",
        "Prompts are cut at the limit: the question may be gone before the model sees it.",
        "The share of prompts at the limit is over `truncated_prompts`.",
    ),
    (
        "prompt/double-bos",
        "warning",
        "Prompts begin with the BOS token twice, which the model has never seen.",
        "Preflight looks at the first two tokens of its prompts.",
    ),
    (
        "output/unparseable",
        "error",
        "Almost no completion has the form that the task can read.",
        "The share that parses is under `parse_rate`; a warning if it is between that and `parse_rate_warning`.",
    ),
    (
        "answer/unusable",
        "warning",
        "Episodes end without an answer, with a list in place of one, or citing documents that do not exist.",
        "A count an episode is over `unusable_answers` over the steps looked at; that most have no answer is "
        "output/unparseable instead.",
    ),
    (
        "reward/constant",
        "error",
        "All completions of a group earn the same, so no advantage and no policy gradient is left.",
        "The share of groups without spread is over `zero_variance_groups` over the steps looked at.",
    ),
    (
        "advantage/amplified",
        "error",
        "Dividing by a tiny spread turns noise in the reward into advantages of full size.",
        "loss.scale_rewards divides by a std, and 1 / (typical within-group std of the groups with spread) is over "
        "`advantage_amplification`.",
    ),
    (
        "kl/at-start",
        "error",
        "Policy and reference differ before anything was trained.",
        "KL(policy‖reference) before the first update is over `kl_at_start`.",
    ),
    (
        "optim/lr-too-high",
        "error",
        "An update moves the policy further than the clipping was made for.",
        "One of the first updates at the full learning rate moves the KL by more than `kl_per_update`; in preflight, "
        "the one update that is tried.",
    ),
    (
        "kl/explosion",
        "error",
        "KL has left every useful range; with k3 a single token can contribute e^d.",
        "A step's KL is over `kl_explosion`, or over `kl_growth` times its running median and over "
        "`kl_explosion_floor`; the KL after the last update counts too. A warning if it came back.",
    ),
    (
        "optim/non-finite",
        "error",
        "Loss or gradient was NaN or infinite and the update was skipped.",
        "guard/nonfinite counts such steps (guard/skipped where a log has only that), or a loss or gradient norm is "
        "not finite. A warning if they are at most `skipped_share` of the steps.",
    ),
    (
        "ratio/all-clipped",
        "error",
        "Nearly all probability ratios are clipped: old and current log-probabilities are different things.",
        "The clipped share is over `clipped_ratios`.",
    ),
    (
        "kl/over-budget",
        "warning",
        "The policy is further from the reference than the budget allows.",
        "The mean KL of the last steps is over `kl_over_budget`, or over kl.budget.max where one is set.",
    ),
    (
        "length/explosion",
        "warning",
        "Completions grow without the reward growing with them.",
        "Mean length at the end is over `length_growth` times that at the start, with no gain in reward.",
    ),
    (
        "entropy/collapse",
        "warning",
        "The policy has stopped exploring: it writes nearly the same each time.",
        "Mean entropy is under `entropy_collapse` and under `entropy_collapse_share` of what it was at the start, "
        "while the reward no longer grows and is not at its best.",
    ),
    (
        "optim/spike",
        "warning",
        "A gradient norm far above its running median.",
        "grad/norm is over `grad_spike` times the median of the updates made before it. A note unless more than "
        "`spike_share` of the steps do that or gradients are not clipped; an error if a run of skipped ones ended it.",
    ),
    (
        "task/repeats",
        "warning",
        "Every step asks the same problems.",
        "Preflight asks the task for the prompts of steps 0, 1 and 2: the same each time, or a single one.",
    ),
    (
        "eval/train-gap",
        "warning",
        "Training and evaluation disagree: another prompt, another template, another judge.",
        "Preflight renders the same problems by both paths. In a log: reward rises by over `gap_reward` "
        "while held-out accuracy falls below its interval.",
    ),
    (
        "eval/leak",
        "warning",
        "Held-out problems are trained on: evaluation measures memory.",
        "Preflight looks for held-out prompts among the training problems of the first steps.",
    ),
    (
        "retention/dropping",
        "warning",
        "A skill that is not trained is being forgotten.",
        "Accuracy on a retention task fell by more than `retention_drop` of what it was, with intervals apart.",
    ),
    (
        "guard/rolled-back",
        "warning",
        "The run went back to an earlier checkpoint, or was stopped by a guard.",
        "events.jsonl or guard/rollbacks says so.",
    ),
    (
        "reward/weak",
        "warning",
        "Rewards differ so little within a group that the update is mostly noise.",
        "The mean within-group std of the reward is under `reward_spread` and the reward has not grown by more than "
        "`flat_reward` standard errors, over at least `steps_to_judge` steps.",
    ),
    (
        "reward/fickle",
        "warning",
        "The same completion earns another reward the next time it is judged.",
        "Preflight judges its batch twice, the second time in the other order.",
    ),
    (
        "kl/not-learning",
        "warning",
        "The policy stays where it started and the reward is flat.",
        "Mean KL to a reference that stays is under `kl_not_learning` and the reward's gain is within `flat_reward` "
        "standard errors, over at least `steps_to_judge` steps.",
    ),
    (
        "kl/scale",
        "warning",
        "The KL term points the right way with another size than kl.beta says.",
        "Preflight sums the term's gradient over the vocabulary: within `kl_gradient_named` a factor other than 1 "
        "times that of an allowed divergence, or cosine over `kl_gradient_cosine`. A note where a penalty in the "
        "reward is divided by the rewards' deviation.",
    ),
    (
        "kl/unneeded",
        "note",
        "A KL penalty where the recipe means to have none.",
        "kl.beta > 0 with loss.loss_type=dr_grpo and rewards that are rules.",
    ),
    (
        "doctor/probe-failed",
        "warning",
        "A part could not be tried at all.",
        "An experiment of the preflight ended in an error of the part that it was trying.",
    ),
    (
        "doctor/threshold-raised",
        "note",
        "An alarm is less sensitive than shipped: what it would have said may be missing here.",
        "A threshold was overridden, in the configuration's doctor section or by --threshold, to the quiet side.",
    ),
)

CODES: dict[str, Code] = {
    name: Code(name, meaning, decided, severity, rank) for rank, (name, severity, meaning, decided) in enumerate(_ROWS)
}


def found(code: str, evidence: str, cause: str, advice: str | Advice, severity: Severity | None = None) -> Finding:
    """A finding under a known code, as severe as its row says unless `severity` does."""
    if code not in CODES:
        raise unknown("finding code", code, CODES)
    options = tuple(overrides(proposal) for proposal in advice.proposals) if isinstance(advice, Advice) else ()
    return Finding(code, severity or CODES[code].severity, evidence, cause, str(advice), options)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first: by severity, then causes before their symptoms; equal ones keep their order."""
    return sorted(
        findings,
        key=lambda finding: (
            SEVERITIES.index(finding.severity),
            CODES[finding.code].rank if finding.code in CODES else len(CODES),
        ),
    )
