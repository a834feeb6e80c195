"""Evaluation against training: the same problems must reach the engine as the same tokens, with the same sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keel.base.types import Problem
from keel.doctor.evidence import SAME
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.exploration import drawn_logits, entropy
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.probes.judged_golds import totals_of
from keel.doctor.probes.repeats import held_out_problems, training_steps
from keel.doctor.probes.states import mean_kl, state_logits
from keel.doctor.probes.unpaid import value
from keel.doctor.recording import RecordingEngine
from keel.doctor.rendering import rendered
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.envs.answers import plain_number
from keel.envs.judge import Judge
from keel.eval.evaluate import evaluate
from keel.rollout import SamplingParams
from keel.rollout.collect import Collector
from keel.run.build import build_renderer

_MIN_PROMPTS = 6  # prompts on either side before their common beginnings are compared
_HELD_OUT = 32
_COMPARED = ("top_p", "top_k", "min_p", "max_completion_length", "stop")


def probe_evaluation(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """Both paths with the engine's requests recorded: tokens, sampling, and what all prompts of either side share."""
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
        *_sampling(recorder, setup.sampling),
        *_noise(setup, recorder.sampling, thresholds),
        *_beginnings(setup),
        *form_findings(setup),
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
        f"{len(different)} of {len(recorder.first)} prompts are other tokens in evaluation; {first.key!r} has "
        f"{len(first.tokens)} against {len(trained[first.key])} in training",
        "the two paths render prompts differently: the tokenizer or the task keeps a state",
        "make task and tokenizer free of state; data.chat_template and data.system_prompt hold for both",
        severity="error",
    )


def _sampling(recorder: RecordingEngine, sampling: SamplingParams) -> Iterator[Finding]:
    used = recorder.sampling
    if used is None:
        return
    different = [name for name in _COMPARED if getattr(used, name) != getattr(sampling, name)]
    if not different:
        return
    differences = ", ".join(f"{name} {getattr(used, name)} against {getattr(sampling, name)}" for name in different)
    yield finding(
        "eval/train-gap",
        f"evaluation samples with {differences}",
        "completions are drawn in another way than in training",
        "use the same rollout settings for both",
    )


def _noise(setup: KeelSubject, used: SamplingParams | None, thresholds: Thresholds) -> Iterator[Finding]:
    """What a hotter evaluation draws against the policy at temperature 1, exactly, at the states that it visits."""
    if used is None or not setup.config.eval.every or not used.temperature > setup.temperature > 0:
        return
    own = state_logits(setup, setup.policy.model, temperature=1.0)
    evaluated, trained = (drawn_logits(own, sampling) for sampling in (used, setup.built.sampling))
    apart, limit = mean_kl(evaluated, own), thresholds["exploration_noise"]
    if not apart > limit or not entropy(evaluated) > max(entropy(trained), entropy(own)):
        return
    yield finding(
        "eval/train-gap",
        f"evaluation draws at temperature {used.temperature:g} with an entropy of {entropy(evaluated):.2g} nats per "
        f"token, training at {setup.temperature:g} with {entropy(trained):.2g}; that is {apart:.2g} nats per token "
        f"from the policy (over {limit:g})",
        f"eval.temperature={used.temperature:g}: what is scored is noise, and not what the policy has learned",
        propose("set {}, the temperature of training, or 0 for greedy answers", {"eval.temperature": None}),
    )


def _beginnings(setup: KeelSubject) -> Iterator[Finding]:
    """Tokens that all prompts of one side begin or end with and none of the other does: that is another format."""
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
            "task.held_out asks in another format than task.sample",
            "make both with the same template",
        )
        return


def form_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Held-out answers that a bare number does not earn, where it does on all that are trained on.

    As where one of two files has its answers with units and texts are compared: what is learned scores nothing.
    """
    task, judge, options = setup.run.task, setup.built.judge, setup.config.reward
    if task.prompts_only or task.multi_turn or judge.remote or setup.failures or options.shuffle is not None:
        return
    trained = by_value(setup, task.sample(_HELD_OUT, seed=setup.config.run.seed, step=0))
    held_out = by_value(setup, held_out_problems(setup, _HELD_OUT))
    unpaid = [gold for gold, paid in held_out if not paid]
    if min(len(trained), len(held_out)) < _MIN_PROMPTS or not all(paid for _, paid in trained):
        return
    if 2 * len(unpaid) <= len(held_out):
        return
    yield finding(
        "eval/train-gap",
        f"{len(unpaid)} of {len(held_out)} held-out gold answers do not pay for their bare number, such as "
        f"{unpaid[0][-40:]!r}, and all of {len(trained)} that are trained on do, such as {trained[0][0][-40:]!r}",
        "the held-out answers are written in another form than those that are trained on, and are compared as texts",
        "write the answers of both files alike, or compare values (task.answer)",
    )


def by_value(setup: KeelSubject, problems: Sequence[Problem]) -> list[tuple[str, bool]]:
    """Gold answers that come down to a number, and whether that number earns as much by itself."""
    rows = []
    for problem in problems:
        gold = (gold_or_none(setup.run.task, problem) or [""])[-1]
        if plain_number(value(gold)) is None:
            continue
        bare = gold.strip() == value(gold)  # it is judged as it is: no call is spent on that
        full, alone = (0.0, 0.0) if bare else totals_of(setup, problem, [(gold,), (value(gold),)])
        rows.append((gold, alone >= full - SAME))
    return rows


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    shortest = min(map(len, rows))
    count = next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)
    return rows[0][:count]
