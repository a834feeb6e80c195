"""Evaluation against training: the same problems must reach the engine as the same tokens, with the same sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keel.base.thresholds import Thresholds
from keel.eval.evaluate import evaluate
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.rendering import rendered
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.recording import RecordingEngine
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout import SamplingParams

_MIN_PROMPTS = 6  # prompts on either side before their common beginnings are compared
_COMPARED = ("top_p", "top_k", "min_p", "max_completion_length", "stop")


def probe_evaluation(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """Both paths with the engine's requests recorded: tokens, sampling, and what all prompts of either side share."""
    problems = [group.problem for group in setup.groups]
    trained = {group.problem.key: group.prompt_tokens for group in setup.groups}
    recorder = RecordingEngine(setup.run.engine)
    config = setup.config
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    evaluate(
        recorder,
        setup.run.task,
        problems,
        setup.policy.tokenizer,
        k=(1,),
        temperature=temperature,
        seed=config.run.seed + 1,
        sampling=setup.built.sampling,
        max_turns=config.rollout.max_turns if setup.run.task.several_turns else 1,
        **config.data.prompts,
    )
    findings = [*_tokens(recorder, trained), *_sampling(recorder, setup.sampling), *_beginnings(setup)]
    same = sum(request.tokens == trained[request.key] for request in recorder.first)
    line = f"evaluation: {same} of {len(recorder.first)} prompts are the same tokens as in training"
    return ProbeResult("evaluation", tuple(findings), {"same_prompts": float(same)}, (line,))


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


def _beginnings(setup: ProbeSetup) -> Iterator[Finding]:
    """Tokens that all training prompts begin or end with, and all held-out prompts: other ones are another format."""
    task = setup.run.task
    sides = (task.sample(32, seed=setup.config.run.seed, step=0), task.held_out(32))
    if min(map(len, sides)) < _MIN_PROMPTS:
        return
    trained, held_out = (rendered(setup, side) for side in sides)
    for where, a, b in (
        ("begin", _common(trained), _common(held_out)),
        ("end", _common([t[::-1] for t in trained])[::-1], _common([t[::-1] for t in held_out])[::-1]),
    ):
        shared = min(len(a), len(b))
        head = slice(None, shared) if where == "begin" else slice(-shared or max(len(a), len(b)), None)
        if a[head] == b[head] and abs(len(a) - len(b)) < 2:  # one token more can be chance
            continue
        decode = setup.policy.tokenizer.decode
        yield finding(
            "eval/train-gap",
            f"all training prompts {where} with {decode(list(a))!r}, all held-out prompts with {decode(list(b))!r}",
            "task.held_out asks in another format than task.sample",
            "make both with the same template",
        )
        return


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    shortest = min(map(len, rows))
    count = next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)
    return rows[0][:count]
