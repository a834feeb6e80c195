"""Prompts in the forms of known chat templates: the one that the model knows makes gold answers likelier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from keel.base.types import Problem
from keel.config import Config
from keel.doctor.findings import Finding, Options, finding, propose
from keel.doctor.probes.earnings import earned_otherwise
from keel.doctor.probes.evidence import by_signs, level
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, answer_tokens, blind_surprise, gold_or_none
from keel.doctor.probes.rendering import in_template, messages_of, own_template, template_name, turn_marks
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.models.tiny import CHAT_TEMPLATE
from keel.rollout.render import TEMPLATES, Renderer
from keel.run.build import build_renderer

PROBLEMS = 24
FOLD = 1.0  # nats: e times as likely
# Tests of gold answers that may say prompt/format: of the template (or none), its frame, the system prompt, what
# questions share, and their wording.
SHARED = 5
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
    golds = template_golds(setup, renderer)
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
    chance = of_gains(gains[best]) * len(others)
    if chance > level(thresholds) / SHARED:
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


def plain_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """Plain prompts behind which gold answers, or a token of each, are blind guesses, and are none in the template.

    A model may be asked in plain text on purpose, and write more than the answer: then it earns by it, too. Where it
    knows the answers either way, only what it earns tells.
    """
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    template = own_template(setup.policy.tokenizer)
    golds = prompt_golds(setup, renderer, PROBLEMS, filled=False) if template else []
    if len(golds) < PROBLEMS // 2:
        return
    asked = [Gold(_filled(renderer, problem, template or ""), gold.answer) for problem, gold in golds]
    if not all(gold.prompt for gold in asked):
        return
    plain, filled = (answer_tokens(setup, rows) for rows in ([gold for _, gold in golds], asked))
    worst, least = (fmean(float(-row.min()) for row in rows) for rows in (plain, filled))
    gains = [float(after.mean() - before.mean()) for before, after in zip(plain, filled, strict=True)]
    chance, guess = of_gains(gains), math.log(setup.vocabulary)
    blind = thresholds["bos_surprise"] * guess
    guessed = worst >= guess or -fmean(float(row.mean()) for row in plain) >= blind
    sure = fmean(gains) > thresholds["template_gain"] and chance <= level(thresholds) / SHARED
    if least >= blind or not sure:
        return
    set_template = {"data.chat_template": template_name(setup.policy.tokenizer)}
    earned = earned_otherwise(setup, with_data(setup.config, set_template), thresholds)
    proven = earned is not None and earned.sure
    if not proven and (not guessed or (earned is not None and earned.other < earned.own)):
        return
    setup.shared["another template"] = "plain prompts"
    yield finding(
        "prompt/format",
        f"the worst token of gold answers has a surprise of {worst:.2g} nats after the plain prompts (a blind guess "
        f"has {guess:.2g}), and of {least:.2g} in the tokenizer's chat template ({len(golds)} problems, chance "
        f"{chance:.1g})" + (f", where completions earn {earned}" if earned is not None else ""),
        "prompts are not put into the chat template that the tokenizer brings, in which the model answers better",
        propose("set {}" + ("" if proven else "; nothing, if plain prompts are meant"), set_template),
        severity=None if proven and guessed else "warning",
    )


def with_data(config: Config, options: Options) -> Config:
    """A configuration with other options of `data`."""
    update = {name.removeprefix("data."): value for name, value in options.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def _filled(renderer: Renderer, problem: Problem, template: str) -> tuple[int, ...]:
    """A prompt in a template; () where that refuses it."""
    tokenizer: Any = renderer.tokenizer
    messages = [dict(message) for message in messages_in(renderer, problem)]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates raise what they like
        return ()
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def template_golds(setup: ProbeSetup, renderer: Renderer, count: int = PROBLEMS) -> list[tuple[Problem, Gold]]:
    """Problems in a template with their prompts and gold answers of one turn."""
    return prompt_golds(setup, renderer, count, filled=True)


def prompt_golds(setup: ProbeSetup, renderer: Renderer, count: int, *, filled: bool) -> list[tuple[Problem, Gold]]:
    """Problems with their prompts and gold answers of one turn: those in a template, or those in none.

    None where all have the same answer, whose likelihood says nothing of what is asked.
    """
    task, encode = setup.run.task, setup.policy.tokenizer.encode
    if task.prompts_only or task.multi_turn:
        return []
    drawn = task.sample(count, seed=setup.config.run.seed, step=0)
    problems = [problem for problem in drawn if in_template(renderer, problem) == filled]
    answered = [(p, turns[-1]) for p in problems if (turns := gold_or_none(task, p))]
    rows = [(p, Gold(renderer.prompt(p), tuple(encode(gold, add_special_tokens=False)))) for p, gold in answered]
    room = setup.policy.context_length or 1 << 30
    if len({problem.key for problem, _ in rows}) > 1 and len({gold.answer for _, gold in rows}) == 1:
        return []
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
        messages = messages_in(renderer, problem)
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        rows.append(tuple(int(token) for token in tokenizer.encode(f"{text}{opening}", add_special_tokens=False)))
    return [] if rows == [renderer.prompt(problem) for problem in problems] else rows


def messages_in(renderer: Renderer, problem: Problem) -> list[Mapping[str, str]]:
    """A problem's messages, after the configured system prompt."""
    messages = messages_of(problem)
    if renderer.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": renderer.system_prompt}, *messages]


def of_gains(gains: Sequence[float]) -> float:
    """The chance of such gains where nothing is gained: the clearest of three tests, of their mean and of their signs.

    A few answers that gain all of it spread a mean, however sure it is that none to which it matters loses by it.
    """
    return min(1.0, 3 * min(by_chance(gains), by_signs(gains), by_signs(gains, FOLD)))


def by_chance(gains: Sequence[float]) -> float:
    """The chance of so high a mean where the true one is 0 (Student's t); 1 where a gain is no number."""
    from scipy.special import stdtr  # the cdf of scipy.stats.t, at a fifth of the import

    if not all(map(math.isfinite, gains)):
        return 1.0
    error = stdev(gains) / len(gains) ** 0.5
    return float(stdtr(len(gains) - 1, -fmean(gains) / max(error, 1e-12)))
