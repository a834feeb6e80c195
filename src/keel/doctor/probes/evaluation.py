"""Evaluation against training: equal problems must reach the engine as equal tokens with equal sampling options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.exploration import drawn_logits, entropy
from keel.doctor.probes.problems import held_out_problems, training_steps
from keel.doctor.probes.states import mean_kl, state_logits
from keel.doctor.recording import RecordingEngine
from keel.doctor.rendering import rendered
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.envs.judge import Judge
from keel.eval.evaluate import evaluate
from keel.rollout import SamplingParams
from keel.rollout.collect import Collector
from keel.run.build import build_renderer

_MIN_PROMPTS = 6  # prompts needed on either side to compare their common beginnings
_HELD_OUT = 32


def probe_evaluation(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
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
        *_noise(setup, recorder.sampling, thresholds),
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
        f"{len(different)} of {len(recorder.first)} prompts are other tokens in evaluation; {first.key!r} has "
        f"{len(first.tokens)} against {len(trained[first.key])} in training",
        "the two paths render prompts differently: the tokenizer or the task keeps a state",
        "make task and tokenizer free of state; data.chat_template and data.system_prompt hold for both",
        severity="error",
    )


def _noise(setup: KeelSubject, used: SamplingParams | None, thresholds: Thresholds) -> Iterator[Finding]:
    """The excess entropy of an evaluation at a higher temperature, computed exactly at the visited states."""
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
            "task.held_out asks in another format than task.sample",
            "make both with the same template",
        )
        return


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    shortest = min(map(len, rows))
    count = next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)
    return rows[0][:count]
