"""Next-token distributions at the batch's action tokens: of the policy, of sampling, and of evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from keel.doctor.advice import unfiltered
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.problems import held_out_problems, training_steps
from keel.doctor.recording import RecordingEngine
from keel.doctor.rendering import rendered
from keel.envs.judge import Judge
from keel.eval.evaluate import evaluate
from keel.kl import exact_kl
from keel.models.head import evaluating, head_of
from keel.models.scorer import hidden_states
from keel.rollout.collect import Collector
from keel.rollout.sampling import SamplingParams, filter_threshold
from keel.run.build import build_renderer

# ------------------------------------------------------------------------ visited states

MAX_STATES = 128
MAX_ELEMENTS = 1 << 24  # limit of states × vocabulary in memory


def chosen_states(setup: KeelSubject) -> Tensor:
    """Indices of the states to use, evenly spaced over the batch's action tokens."""
    total = int(setup.mask.sum())
    count = max(1, min(total, MAX_STATES, MAX_ELEMENTS // setup.vocabulary))
    return torch.linspace(0, total - 1, count).round().long().unique()


@torch.no_grad()
def state_logits(setup: KeelSubject, model: nn.Module, *, temperature: float | None = None) -> Tensor:
    """`[N, V]` logits in fp32 and evaluation mode, by default at the sampling temperature.

    The N states are the same for every model.
    """
    parts = []
    with evaluating(model), setup.run.autocast():
        head = head_of(model)
        for micro in setup.batch.micros:
            packed = micro.packed
            acted = packed.action_mask[packed.completion_mask]
            parts.append(hidden_states(model, packed)[acted])
        hidden = torch.cat(parts)
        return head(hidden[chosen_states(setup).to(hidden.device)]).float() / (
            setup.temperature if temperature is None else temperature
        )


def policy_states(setup: KeelSubject) -> Tensor:
    """The policy's logits at the visited states, with its current weights."""
    return state_logits(setup, setup.policy.model)


def reference_states(setup: KeelSubject) -> Tensor:
    """The reference's logits at the same states."""
    assert setup.run.reference is not None
    with setup.run.reference.model() as model:
        return state_logits(setup, model)


def mean_kl(first: Tensor, second: Tensor) -> float:
    """KL(first‖second) in nats per token from logits `[N, V]`: exact over the vocabulary, mean over states."""
    return exact_kl(first.double().log_softmax(-1), second.double().log_softmax(-1)).mean().item()


# ------------------------------------------------------------------------ exploration

LEAST_CHOICE = math.log(2)  # least entropy, in nats, of a group's completions after the first


def probe_exploration(setup: KeelSubject) -> Outcome:
    """Compare the entropy of the sampling distribution with the policy's at temperature 1, at the visited states."""
    sampling = setup.built.sampling
    own = state_logits(setup, setup.policy.model, temperature=1.0)
    setup.of_batch["own_states"] = own  # the update probe starts from these states
    drawn = drawn_logits(own, sampling)
    figures = {
        "entropy_own": entropy(own),
        "entropy_drawn": entropy(drawn),
        "kl_drawn": mean_kl(drawn, own),
        "entropy_uniform": math.log(setup.vocabulary),
    }
    line = (
        f"exploration: entropy {figures['entropy_drawn']:.3g} nats per token as drawn, {figures['entropy_own']:.3g} "
        f"at temperature 1 without filters; the sampling distribution is {figures['kl_drawn']:.2g} nats per token "
        "from the policy"
    )
    return Outcome("exploration", tuple(_findings(setup, figures)), figures, (line,))


def drawn_logits(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits `[N, V]` of the sampling distribution: temperature, then filters; greedy keeps one token.

    Tokens that cannot be drawn are −∞.
    """
    if sampling.greedy:
        return torch.full_like(logits, -math.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    warm = logits / sampling.temperature
    return warm.masked_fill(warm < filter_threshold(warm, sampling), -math.inf) if sampling.filtered else warm


def entropy(logits: Tensor) -> float:
    """Mean entropy in nats of distributions with logits `[N, V]`."""
    logp = logits.double().log_softmax(-1)
    return max(0.0, float(-(logp.exp() * logp).nan_to_num(0.0).sum(-1).mean()))


def _findings(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    rollout = setup.config.rollout
    own, drawn = figures["entropy_own"], figures["entropy_drawn"]
    names = ("temperature", "top_p", "top_k", "min_p")
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    chosen = {name: getattr(rollout, name) for name in names if getattr(rollout, name) != usual[name]}
    options = ", ".join(f"rollout.{name}={value:g}" for name, value in chosen.items())
    warm = {"rollout.temperature": 1.0} if "temperature" in chosen else {}
    tree = setup.config.to_dict()
    if not chosen:
        return
    spread = own * setup.completion_length * (rollout.num_generations - 1)
    differs = own > setup.thresholds["entropy_collapse"] and spread > LEAST_CHOICE
    if differs and drawn < setup.thresholds["exploration_least"] * own:
        yield finding(
            "rollout/temperature",
            f"the sampling distribution has an entropy of {drawn:.2g} nats per token, and the policy {own:.2g} at "
            f"temperature 1: {drawn / own:.1%} of the entropy is left (under "
            f"{setup.thresholds['exploration_least']:.0%})",
            f"with {options}, the completions of a group become nearly equal, so their rewards cannot be compared",
            propose("set {}", {**warm, **unfiltered(tree)}),
            # below LEAST_CHOICE, completions of a group are near copies in any case
            severity=None if own * setup.completion_length > LEAST_CHOICE else "warning",
        )
    elif drawn > own and figures["kl_drawn"] > setup.thresholds["exploration_noise"]:
        yield finding(
            "rollout/temperature",
            f"the sampling distribution is {figures['kl_drawn']:.2g} nats per token from the policy at temperature 1 "
            f"(over {setup.thresholds['exploration_noise']:g}): its entropy is {drawn:.2g} nats per token, the "
            f"policy's is {own:.2g}, and that of uniform sampling is {figures['entropy_uniform']:.2g}",
            f"with {options}, samples are mostly noise, so rewards say little about the policy",
            propose("set {}", {"rollout.temperature": 1.0}),
        )


# ------------------------------------------------------------------------ evaluation

_MIN_PROMPTS = 6  # prompts needed on either side to compare their common beginnings
_HELD_OUT = 32


def probe_evaluation(setup: KeelSubject) -> Outcome:
    """Compare the engine's requests in training and evaluation: tokens, sampling options, common beginnings."""
    problems = [group.problem for group in setup.groups]
    trained = {group.problem.key: group.prompt_tokens for group in setup.groups}
    recorder = RecordingEngine(setup.run.engine)
    config = setup.config
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    task = setup.run.task
    collector = Collector(
        recorder,
        task,
        build_renderer(config, setup.policy.tokenizer),
        setup.built.sampling,
        Judge.of(task),
        seed=config.run.seed + 1,
        max_turns=config.rollout.max_turns if task.multi_turn else 1,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
    )
    evaluate(collector, problems, temperature=temperature)
    findings = [
        *_tokens(recorder, trained),
        *_noise(setup, recorder.sampling),
        *_beginnings(setup),
    ]
    same = sum(request.tokens == trained[request.key] for request in recorder.first)
    line = f"evaluation: {same} of {len(recorder.first)} prompts are the same tokens as in training"
    return Outcome("evaluation", tuple(findings), {"same_prompts": float(same)}, (line,))


def _tokens(recorder: RecordingEngine, trained: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    different = [request for request in recorder.first if request.tokens != trained[request.key]]
    if not different:
        return
    first = different[0]
    yield finding(
        "eval/train-gap",
        f"{len(different)} of {len(recorder.first)} prompts have other tokens in evaluation; {first.key!r} has "
        f"{len(first.tokens)} tokens, and {len(trained[first.key])} in training",
        "training and evaluation render prompts differently: the tokenizer or the task has a state",
        "make the task and the tokenizer stateless; data.chat_template and data.system_prompt apply to both",
        severity="error",
    )


def _noise(setup: KeelSubject, used: SamplingParams | None) -> Iterator[Finding]:
    """Find an evaluation whose higher temperature makes its samples noise; exact at the visited states."""
    if used is None or not setup.config.eval.every or not used.temperature > setup.temperature > 0:
        return
    own = state_logits(setup, setup.policy.model, temperature=1.0)
    evaluated, trained = (drawn_logits(own, sampling) for sampling in (used, setup.built.sampling))
    apart, limit = mean_kl(evaluated, own), setup.thresholds["exploration_noise"]
    if not apart > limit or not entropy(evaluated) > max(entropy(trained), entropy(own)):
        return
    yield finding(
        "eval/train-gap",
        f"evaluation samples at temperature {used.temperature:g} with an entropy of {entropy(evaluated):.2g} nats per "
        f"token, training at {setup.temperature:g} with {entropy(trained):.2g}; its distribution is {apart:.2g} nats "
        f"per token from the policy (over {limit:g})",
        f"eval.temperature={used.temperature:g}: the evaluated completions are mostly noise",
        propose("set {} (the temperature of training), or 0 for greedy answers", {"eval.temperature": None}),
    )


def _beginnings(setup: KeelSubject) -> Iterator[Finding]:
    """Tokens at the start or end of all prompts on one side only: training and evaluation use different formats."""
    held_out = rendered(setup, held_out_problems(setup, _HELD_OUT))
    trained = [prompt for step in training_steps(setup) for _, prompt in step]
    if min(len(trained), len(held_out)) < _MIN_PROMPTS:
        return
    for where, order in (("begin", 1), ("end", -1)):
        sides = [[tokens[::order] for tokens in side] for side in (trained, held_out)]
        a, b = map(_common, sides)
        shared = any(row[: len(b)] == b for row in sides[0]) and any(row[: len(a)] == a for row in sides[1])
        if shared:
            continue
        decode = setup.policy.tokenizer.decode
        yield finding(
            "eval/train-gap",
            f"all training prompts {where} with {decode(list(a[::order]))!r}, all held-out prompts with "
            f"{decode(list(b[::order]))!r}",
            "task.held_out and task.sample have different prompt formats",
            "build the prompts of both with the same template",
        )
        return


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    shortest = min(map(len, rows))
    count = next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)
    return rows[0][:count]
