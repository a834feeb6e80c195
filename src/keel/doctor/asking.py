"""Other ways to ask: in another template or none, without a part of it, in another wording.

Gold answers choose the way that the model knows (`decide`); each table says what more it takes to accuse the run's own.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from keel.base.types import Problem
from keel.config import Config
from keel.doctor.decide import CHOOSING, Table, by_mean, decide
from keel.doctor.evidence import level
from keel.doctor.findings import Advice, Options, Severity, finding, propose
from keel.doctor.frame import Frame, Tokens, frame_of
from keel.doctor.hypothesis import Hypothesis, swap
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.rendering import (
    in_template,
    messages_in,
    messages_of,
    own_template,
    template_name,
    tokenizer_finding,
    turn_marks,
)
from keel.doctor.verdict import Outcome, Verdict
from keel.models.tiny import CHAT_TEMPLATE
from keel.rollout.render import TEMPLATES
from keel.run.build import build_renderer

Prompt = Callable[[Problem], Tokens]
SHOWN = 80  # characters of a text


def asked(name: str, prompt: Prompt, cause: str, advice: str | Advice, severity: Severity | None = None) -> Hypothesis:
    return Hypothesis(name, "prompt/format", cause, advice, swap(prompt=prompt), severity)


def with_data(config: Config, options: Options) -> Config:
    """A configuration with other options of `data`."""
    update = {name.removeprefix("data."): value for name, value in options.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def _decoded(subject: KeelSubject, tokens: Sequence[int]) -> str:
    return str(subject.policy.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _filled(subject: KeelSubject, problem: Problem) -> bool:
    return not subject.run.task.multi_turn and in_template(subject.renderer, problem)


def _of_one_turn(subject: KeelSubject, problem: Problem) -> bool:
    return not subject.run.task.multi_turn


def _plain(subject: KeelSubject, problem: Problem) -> bool:
    return _of_one_turn(subject, problem) and not in_template(subject.renderer, problem)


# ------------------------------------------------------------------------ in another template

_TURNS = "{{% for message in messages %}}{{{{ {} }}}}{{% endfor %}}{{{{ {} }}}}"
_ROLE = "'<|' + message['role'] + '|>\\n' + message['content'] + "


def _turns(turn: str, header: str) -> str:
    return _TURNS.format(turn, header)


# By name: the tokens that a tokenizer must have for it, and the template.
KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "<|user|>…": (("<|user|>", "<|assistant|>"), CHAT_TEMPLATE),
    "Zephyr": (("<|user|>", "<|assistant|>"), _turns(_ROLE + "eos_token + '\\n'", "'<|assistant|>\\n'")),
    "Phi 3": (("<|user|>", "<|assistant|>", "<|end|>"), _turns(_ROLE + "'<|end|>\\n'", "'<|assistant|>\\n'")),
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


def templates(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Templates whose marks are tokens of the tokenizer, with what the run's own prompts begin of an answer."""
    tokenizer: Any = subject.policy.tokenizer
    known, own = tokenizer.get_vocab(), turn_marks(tokenizer, subject.renderer.template)
    opening = own.opening if own is not None and own.fault is None else ""
    for name, (marks, template) in KNOWN.items():
        if all(mark in known for mark in marks):
            yield asked(
                f"after prompts in the form of {name} than after those that are rendered",
                partial(_in_template, subject, template=template, opening=opening),
                "the chat template is not the one that the model was trained on: other marks, other ends of turns, or "
                "another header before the answer",
                "use the template that the model was published with (tokenizer.chat_template), or one of its kind "
                "(data.chat_template)",
            )


def own_templates(subject: KeelSubject) -> Iterator[Hypothesis]:
    """The tokenizer's template, for prompts that are not put into it."""
    template, name = own_template(subject.policy.tokenizer), template_name(subject.policy.tokenizer)
    if template:
        yield asked(
            "in the tokenizer's chat template than after the plain prompts",
            partial(_in_template, subject, template=template, opening=""),
            "prompts are not put into the chat template that the tokenizer brings, in which the model answers better",
            propose("set {}; nothing, if plain prompts are meant", {"data.chat_template": name}),
        )


def _in_template(subject: KeelSubject, problem: Problem, template: str, opening: str) -> Tokens:
    """A prompt in a template; as it is where that refuses it."""
    tokenizer: Any = subject.policy.tokenizer
    messages = [dict(message) for message in messages_in(subject.renderer, problem)]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates raise what they like
        return subject.prompt(problem)
    return tuple(int(token) for token in tokenizer.encode(f"{text}{opening}", add_special_tokens=False))


def without_system(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Without the configured system prompt; `auto` leaves texts plain then, so that the template is named too."""
    text, tokenizer = subject.config.data.system_prompt, subject.policy.tokenizer
    ways: list[dict[str, Any]] = [{"data.system_prompt": None}] if text is not None else []
    if ways and subject.config.data.chat_template == "auto":
        ways.append({"data.system_prompt": None, "data.chat_template": template_name(tokenizer)})
    for options in ways:
        yield asked(
            f"without data.system_prompt={str(text)[:SHOWN]!r}",
            build_renderer(with_data(subject.config, options), tokenizer).prompt,
            "the model was not trained behind this system prompt, or not in the chat template that it brings with it",
            propose("set {}, or the one that the model was trained with; nothing, if it is meant to be there", options),
        )


# ------------------------------------------------------------------------ without a part

CUTS = 5  # places on either side that are tried
FEWEST = 4  # tokens of an instruction: a rare word or two are a switch that some models have


def _framed(subject: KeelSubject) -> Callable[[Problem], Frame | None]:
    @cache
    def of_prompt(key: str, tokens: Tokens) -> Frame | None:
        return frame_of(subject.renderer, problems[key], tokens)

    problems: dict[str, Problem] = {}

    def of_problem(problem: Problem) -> Frame | None:
        problems[problem.key] = problem
        return of_prompt(problem.key, subject.prompt(problem))

    return of_problem


def template_parts(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Without what the template writes by itself, part by part."""
    framed = _framed(subject)
    filled = [problem for problem in subject.problems(CHOOSING) if _filled(subject, problem)]
    frames = [frame for frame in map(framed, filled) if frame is not None]
    for name in frames[0].parts() if frames else ():

        def prompt(problem: Problem, name: str = name) -> Tokens:
            frame = framed(problem)
            parts = {} if frame is None else frame.parts()
            return subject.prompt(problem) if frame is None or name not in parts else frame.without(parts[name])

        text = " … ".join(_decoded(subject, frames[0].tokens[a:b]) for a, b in frames[0].parts()[name])
        side = {"before": "before", "words": "around"}.get(name.split()[0], "behind")
        yield asked(
            f"without {text[:SHOWN]!r}, which the chat template writes {side} the messages by itself",
            prompt,
            "the template writes something that the model was not trained behind: a system prompt of another model, an "
            "instruction, the opening of a thought, quotes around a message, a mark twice",
            "take that out of the template (tokenizer.chat_template), or use the one that the model was published with "
            "(data.chat_template)",
        )


def shared_text(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Without the words that all questions begin or end with, up to a sign or to the end of what they share."""
    framed = _framed(subject)

    def region(problem: Problem) -> tuple[int, int] | None:
        tokens, frame = subject.prompt(problem), None
        if in_template(subject.renderer, problem):
            frame = framed(problem)
            return None if frame is None else frame.messages
        return int(tokens[0] == subject.policy.tokenizer.bos_token_id), len(tokens)

    chosen = [(subject.prompt(p), r) for p in subject.problems(CHOOSING) if (r := region(p)) is not None]
    rows = [tokens[start:stop] for tokens, (start, stop) in chosen]
    if len(set(rows)) < 2:
        return
    heads, tails = _places(subject, rows), _places(subject, [row[::-1] for row in rows])
    shortest = min(map(len, rows)) - 1
    for head, tail in ((h, t) for h in heads for t in tails if FEWEST <= h + t <= shortest):

        def prompt(problem: Problem, head: int = head, tail: int = tail) -> Tokens:
            place, tokens = region(problem), subject.prompt(problem)
            if place is None or place[1] - place[0] <= head + tail:
                return tokens
            return (*tokens[: place[0]], *tokens[place[0] + head : place[1] - tail], *tokens[place[1] :])

        parts = (rows[0][:head], rows[0][len(rows[0]) - tail :])
        text = " … ".join(_decoded(subject, part) for part in parts if part)
        yield asked(
            f"without {text[:SHOWN]!r}, which stands around every question",
            prompt,
            "the data ask in another form than the model was taught: markup of a page, headings, an example or an "
            "instruction of another set",
            "take that out of the questions, or ask the model in the form that it knows; nothing, if it is to learn "
            "this form",
        )


def _places(subject: KeelSubject, rows: Sequence[Tokens]) -> list[int]:
    """How many tokens may be left out of what all rows begin with; none of them, first."""
    most = min(map(len, rows)) - 1
    shared = next((i for i in range(most) if len({row[i] for row in rows}) > 1), most)
    texts = [_decoded(subject, [token]) for token in rows[0][:shared]]
    signs = [i + 1 for i, text in enumerate(texts) if not text.strip().isalnum()]
    places = [*dict.fromkeys((*signs, *([shared] if shared else [])))]
    return [0, *reversed(places[:: -max(1, -(-len(places) // CUTS))])]


# ------------------------------------------------------------------------ in another wording

_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_SPELLED = re.compile(rf"\b(?:{'|'.join(_NUMBERS)})\b", re.IGNORECASE)
_MARKUP = re.compile(r"<[^<>]+>|\\(?:begin|end)\{\w*\}|[*_`#$]|\\[a-z]+\{|[{}]")
_LABEL = re.compile(r"^[ \t]*(?:\*\*|__)?[^\W\d]\w*(?: ?\d+)?[.:](?:\*\*|__)?(?:[ \t]+|$)", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])\+?\d+(?:[,_']\d{3})*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?(?![\w.]*\w)")
_JOINED = re.compile(r"(?<=\w)(?:%20|[-_+.,;|/])(?=\w)")
_SIDE_BY_SIDE = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")


def _plainly(number: re.Match[str]) -> str:
    """A number as it is counted with: without places behind the point that say nothing, nor zeros before it."""
    value = float(re.sub(r"[,_']", "", number[0]))
    return str(int(value)) if value.is_integer() else repr(value)


def _shown(text: str) -> str:
    """In the plain form of every character, without those that are not seen."""
    plain = unicodedata.normalize("NFKC", html.unescape(text))
    return "".join(character for character in plain if unicodedata.category(character) != "Cf")


def _last_alone(text: str) -> str:
    """From the last place at which the first word stands again, as where rows were joined."""
    first = re.match(r"\s*([^\W\d]{2,})", text)
    places = re.finditer(rf"(?<![^\W\d]){re.escape(first[1])}(?![^\W\d])", text) if first else ()
    return text[[place.start() for place in places][-1] :] if first else text


SAID_OTHERWISE: dict[str, Callable[[str], str]] = {
    "with their numbers in digits": lambda t: _SPELLED.sub(lambda word: str(_NUMBERS.index(word[0].lower())), t),
    "with their digits in words": lambda t: re.sub(r"\d", lambda digit: _NUMBERS[int(digit[0])], t),
    "in lower case": str.lower,
    "in plain characters": _shown,
    "without markup": lambda t: _MARKUP.sub("", t),
    "with their numbers written plainly": lambda t: _NUMBER.sub(_plainly, t),
    "without blanks around them": str.strip,
    "with single blanks": lambda t: " ".join(t.split()),
    "without single blanks": lambda t: " ".join(re.sub(r"(?<=\S) (?=\S)", "", t).split()),
    "with blanks for the signs between words": lambda t: _JOINED.sub(" ", t),
    "with blanks between words and numbers": lambda t: _SIDE_BY_SIDE.sub(" ", t),
}
CUT_SHORT: dict[str, Callable[[str], str]] = {
    "by the first half of their words": lambda t: " ".join(t.split()[: len(t.split()) // 2]),
    "by the second half of their words": lambda t: " ".join(t.split()[len(t.split()) // 2 :]),
    "from where they begin anew": _last_alone,
    "without labels": lambda t: _LABEL.sub("", t).strip(),
    "without their first word": lambda t: " ".join(t.split()[1:]),
    "without their last word": lambda t: " ".join(t.split()[:-1]),
    "by their first line": lambda t: t.strip().partition("\n")[0],
    "by their last line": lambda t: t.strip().rpartition("\n")[2],
    "without their first line": lambda t: t.strip().partition("\n")[2],
    "without their last line": lambda t: t.strip().rpartition("\n")[0],
    "from behind their first colon": lambda t: t.partition(":")[2].lstrip(),
}


def reworded(problem: Problem, way: Callable[[str], str], *, alone: bool = False) -> Problem:
    """A problem whose last message is worded otherwise, `alone` without earlier turns; as it was if nothing is left."""
    own = [dict(message) for message in messages_of(problem)]
    earlier = [message for message in own[:-1] if not alone or message["role"] == "system"]
    text = way(own[-1]["content"])
    if not text.strip():
        return problem
    prompt = text if isinstance(problem.prompt, str) else [*earlier, {**own[-1], "content": text}]
    return replace(problem, prompt=prompt)


def _worded(subject: KeelSubject, ways: dict[str, Callable[[str], str]], **how: Any) -> Iterator[Hypothesis]:
    for name, way in ways.items():
        yield asked(
            f"where questions are asked {name}",
            partial(lambda way, problem: subject.prompt(reworded(problem, way)), way),
            "the data ask in another wording than the model was taught: normalised, marked up, or several at once",
            "ask as the model was taught; nothing, if it is to learn this wording",
            **how,
        )


def wordings(subject: KeelSubject) -> Iterator[Hypothesis]:
    yield from _worded(subject, SAID_OTHERWISE)


def shorter(subject: KeelSubject) -> Iterator[Hypothesis]:
    yield from _worded(subject, CUT_SHORT, severity="warning")  # what is left out may be what one is told to do
    alone = next(_worded(subject, {"by their last message alone": str}, severity="warning"))
    prompt = partial(_last_message, subject)
    yield replace(alone, apply=swap(prompt=prompt))


def _last_message(subject: KeelSubject, problem: Problem) -> Tokens:
    return subject.prompt(reworded(problem, str, alone=True))


# ------------------------------------------------------------------------ marks that are none

MARK = re.compile("|".join([r"<\|[^<>|\n]+\|>", *sorted({re.escape(m) for marks, _ in KNOWN.values() for m in marks})]))
MARKED = 8  # problems


def odd_marks(subject: KeelSubject) -> Iterator[Verdict]:
    """Marks of turns that are no tokens, and prompts that hold padding or end like a text.

    Unless the model was trained on just that: then it knows gold answers behind them, and less so without.
    """
    tokenizer: Any = subject.policy.tokenizer
    problems = [p for p in subject.problems(MARKED) if subject.answer(p) and _of_one_turn(subject, p)]
    filled = [p for p in problems if in_template(subject.renderer, p)]
    plain = [p for p in problems if p not in filled]
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    spelled = _spelled(subject, filled[0]) if filled else []

    def bare(problem: Problem) -> Tokens:
        text = messages_in(subject.renderer, problem)[-1]["content"]
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if spelled and not _is_own(subject, filled, bare):
        mark, pieces = spelled[0], len(tokenizer.encode(spelled[0], add_special_tokens=False))
        evidence = f"the chat template writes {', '.join(map(repr, spelled))}: {mark!r} becomes {pieces} tokens"
        yield Verdict.found(
            tokenizer_finding(f"{evidence}, although it is one of the vocabulary")
            if mark in tokenizer.get_vocab()
            else finding(
                "prompt/format",
                f"{evidence}, none of them a mark, and gold answers are no likelier for it",
                "the template is another model's: this one has no such token and reads letters in place of marks",
                "give a base model plain prompts (data.chat_template=none), or use the template that the model was "
                "published with",
            )
        )
        return
    known = pad is not None and end is not None and pad not in (end, tokenizer.bos_token_id, tokenizer.unk_token_id)
    chosen = filled or plain
    padded = known and bool(chosen) and all(pad in _unpadded(subject.prompt(p), pad) for p in chosen)
    if padded and not _is_own(subject, chosen, lambda p: tuple(end if t == pad else t for t in subject.prompt(p))):
        yield Verdict.found(
            finding(
                "prompt/format",
                f"{tokenizer.pad_token!r}, the pad token, stands within all of {len(chosen)} prompts, and gold "
                f"answers are no likelier for it than for {tokenizer.eos_token!r} in its place",
                "the chat template ends turns in the token that fills up batches, or prompts were padded before "
                "they came: no model is trained to read it, and what masks padding by its id masks these, too",
                f"end turns in {tokenizer.eos_token!r}, or in what the model was published with "
                "(tokenizer.chat_template), and give prompts without padding",
            )
        )
    ends = set(subject.policy.eos_ids) - {tokenizer.bos_token_id}
    ended = bool(plain) and all(len(subject.prompt(p)) > 1 and subject.prompt(p)[-1] in ends for p in plain)
    if ended and not _is_own(subject, plain, lambda p: subject.prompt(p)[:-1]):
        yield Verdict.found(
            finding(
                "prompt/format",
                f"all of {len(plain)} prompts end in {_decoded(subject, subject.prompt(plain[0])[-1:])!r}, the end "
                "of a text, and gold answers are no likelier for it",
                "the tokenizer adds its end token to every text (add_eos_token), or prompts are written with it",
                "switch add_eos_token off, or take the end token out of the prompts",
            )
        )


def _spelled(subject: KeelSubject, problem: Problem) -> list[str]:
    """Marks in a rendered prompt, and in no message, that take several tokens."""
    tokenizer: Any = subject.policy.tokenizer
    said = " ".join(message["content"] for message in messages_in(subject.renderer, problem))
    marks = [m for m in dict.fromkeys(MARK.findall(_decoded(subject, subject.prompt(problem)))) if m not in said]
    return [mark for mark in marks if len(tokenizer.encode(mark, add_special_tokens=False)) > 1]


def _unpadded(tokens: Tokens, pad: int) -> Tokens:
    begin = next((i for i, token in enumerate(tokens) if token != pad), 0)
    return tokens[begin:]


def _is_own(subject: KeelSubject, problems: Sequence[Problem], other: Prompt) -> bool:
    """Whether the model knows answers behind its prompts, and less so behind other ones, by more than chance.

    Where a few problems leave that open, they are the model's own: what is said of a template must be sure.
    """
    if not all(other(problem) for problem in problems):
        return True
    ways = subject, subject.swapped(prompt=other)
    own, less = ([float(logp.mean()) for logp in way.answer_logp(problems)] for way in ways)
    if -fmean(own) >= subject.blind:
        return False
    lost = [subject.thresholds["template_gain"] - (a - b) for a, b in zip(own, less, strict=True)]
    return fmean(lost) < 0 or len(lost) < 2 or by_mean(lost) > subject.thresholds["false_alarms"]


# ------------------------------------------------------------------------ all of them

# In order: the first that is found is the one; each has an equal part of the level of prompt/format.
TABLES: dict[str, Table] = {
    "plain prompts": Table(own_templates, _plain, earns="more"),
    "another template": Table(templates, _filled),
    "a part of the template": Table(template_parts, _filled, foreign=True),
    "the system prompt": Table(without_system, _filled, earns="more"),
    "what questions share": Table(shared_text, _of_one_turn, foreign=True, earns="not less"),
    "the wording": Table(wordings, _of_one_turn, earns="surely more"),
    "a part of the question": Table(shorter, _of_one_turn, least=0.5, earns="surely more"),
}


def measure_format(subject: KeelSubject) -> Outcome:
    """Other templates, without parts of it or of the question, in other words: which makes gold answers likelier."""
    verdicts = list[Verdict]()
    alpha = level(subject.thresholds) / len(TABLES)
    for name, table in TABLES.items():
        if name == "a part of the template":
            verdicts += odd_marks(subject)
        if not any(verdict.state == "found" for verdict in verdicts):
            verdict, chosen = decide(table, subject, alpha=alpha)
            verdicts.append(verdict)
            subject.tried.update({name: chosen} if chosen is not None else {})
        if any(verdict.state == "found" for verdict in verdicts):
            subject.shared["another template"] = True
            break
    sure = sum(verdict.state == "sound" for verdict in verdicts)
    return Outcome.of("prompt format", verdicts, (f"prompt format: {sure} kinds of other prompts make nothing better",))


__all__ = ["TABLES", "measure_format"]
