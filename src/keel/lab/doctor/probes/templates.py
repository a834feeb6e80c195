"""Prompts in the forms of known chat templates: the one that the model knows makes gold answers likelier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from keel.base.thresholds import Thresholds
from keel.base.types import Problem
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import level
from keel.lab.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise, gold_or_none
from keel.lab.doctor.probes.rendering import in_template, messages_of, turn_marks
from keel.lab.doctor.setup import ProbeSetup
from keel.models.tiny import CHAT_TEMPLATE
from keel.rollout.render import TEMPLATES, Renderer
from keel.run.build import build_renderer

PROBLEMS = 24
_TURNS = "{{% for message in messages %}}{{{{ {} }}}}{{% endfor %}}{{{{ {} }}}}"


def _turns(turn: str, header: str) -> str:
    return _TURNS.format(turn, header)


# By name: the tokens that a tokenizer must have for it, and the template.
KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "<|user|>…": (("<|user|>", "<|assistant|>"), CHAT_TEMPLATE),
    "Zephyr": (
        ("<|user|>", "<|assistant|>"),
        _turns("'<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n'", "'<|assistant|>\\n'"),
    ),
    "Phi 3": (
        ("<|user|>", "<|assistant|>", "<|end|>"),
        _turns("'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'", "'<|assistant|>\\n'"),
    ),
    "ChatML": (("<|im_start|>", "<|im_end|>"), TEMPLATES["chatml"]),
    "Llama 3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ bos_token }}"
        + _turns(
            "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>'",
            "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
        ),
    ),
    "Gemma": (
        ("<start_of_turn>", "<end_of_turn>"),
        "{{ bos_token }}"
        + _turns(
            "'<start_of_turn>' + message['role'] + '\\n' + message['content'] + '<end_of_turn>\\n'",
            "'<start_of_turn>model\\n'",
        ),
    ),
    "Mistral": (("[INST]", "[/INST]"), "{{ bos_token }}" + _turns("'[INST] ' + message['content'] + ' [/INST]'", "''")),
}


def template_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Another template by which gold answers are likelier, of those whose marks are tokens of the tokenizer.

    Only where prompts are put into a template: plain ones may be meant to be plain.
    """
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    golds = _golds(setup, renderer)
    others = {name: rows for name in KNOWN if (rows := _rendered(renderer, [p for p, _ in golds], name))}
    if len(golds) < PROBLEMS // 2 or not others:
        return
    own = answer_logp(setup, [gold for _, gold in golds])
    gains: dict[str, list[float]] = {}
    for name, prompts in others.items():
        asked = [Gold(prompt, gold.answer) for prompt, (_, gold) in zip(prompts, golds, strict=True)]
        scored = answer_logp(setup, asked)
        if -fmean(scored) < blind_surprise(setup, thresholds):
            gains[name] = [after - before for before, after in zip(own, scored, strict=True)]
    best = max(gains, key=lambda name: fmean(gains[name]), default=None)
    if best is None or fmean(gains[best]) <= thresholds["template_gain"]:
        return
    chance = _by_chance(gains[best]) * len(others)
    if chance > level(thresholds):
        return
    setup.shared["another template"] = best
    yield finding(
        "prompt/format",
        f"gold answers are {fmean(gains[best]):.2g} nats a token likelier after prompts in the form of {best} than "
        f"after those that are rendered ({len(golds)} problems, chance {chance:.1g})",
        "the chat template is not the one that the model was trained on: other marks, other ends of turns, or another "
        "header before the answer",
        "use the template that the model was published with (tokenizer.chat_template), or one of its kind "
        "(data.chat_template)",
    )


def _golds(setup: ProbeSetup, renderer: Renderer) -> list[tuple[Problem, Gold]]:
    """Problems in a template with their prompts and gold answers of one turn."""
    task, encode = setup.run.task, setup.policy.tokenizer.encode
    if task.unanswered or task.several_turns:
        return []
    problems = [p for p in task.sample(PROBLEMS, seed=setup.config.run.seed, step=0) if in_template(renderer, p)]
    answered = [(p, turns[-1]) for p in problems if (turns := gold_or_none(task, p))]
    rows = [(p, Gold(renderer.prompt(p), tuple(encode(gold, add_special_tokens=False)))) for p, gold in answered]
    room = setup.policy.context_length or 1 << 30
    return [(p, gold) for p, gold in rows if gold.answer and 2 * len(gold.prompt) + len(gold.answer) < room]


def _rendered(renderer: Renderer, problems: Sequence[Problem], name: str) -> list[tuple[int, ...]]:
    """Prompts in a known template; [] where the tokenizer lacks its marks, or it gives what is rendered anyway.

    What the run's own prompts begin of an answer, such as a thought, is begun there too.
    """
    tokenizer: Any = renderer.tokenizer
    marks, template = KNOWN[name]
    known = tokenizer.get_vocab()
    if not problems or not all(mark in known for mark in marks):
        return []
    own = turn_marks(tokenizer, renderer.template)
    opening = own.opening if own is not None and own.fault is None else ""
    rows = []
    for problem in problems:
        messages = messages_of(problem)
        if renderer.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": renderer.system_prompt}, *messages]
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        rows.append(tuple(int(token) for token in tokenizer.encode(f"{text}{opening}", add_special_tokens=False)))
    return [] if rows == [renderer.prompt(problem) for problem in problems] else rows


def _by_chance(gains: Sequence[float]) -> float:
    """The chance of so high a mean where the true one is 0 (Student's t)."""
    from scipy.special import stdtr  # the cdf of scipy.stats.t, at a fifth of the import

    error = stdev(gains) / len(gains) ** 0.5
    return float(stdtr(len(gains) - 1, -fmean(gains) / max(error, 1e-12)))
