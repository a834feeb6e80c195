"""Alternative prompts: another template or none, without a part of the template, or with another wording.

The log-probability of gold answers selects the alternative (`decide`). Each table states the further evidence that a
finding needs.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from keel.base.types import Problem
from keel.config import Config
from keel.doctor.decide import CHOOSING, Hypothesis, Table, by_mean, decide, swap
from keel.doctor.evidence import level
from keel.doctor.findings import Advice, Options, Severity, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome, Verdict
from keel.doctor.rendering import (
    Frame,
    Tokens,
    frame_of,
    in_template,
    messages_in,
    messages_of,
    own_template,
    template_name,
    tokenizer_finding,
    turn_marks,
)
from keel.run.build import build_renderer

Prompt = Callable[[Problem], Tokens]
SHOWN = 80  # characters of a text that are shown


def asked(name: str, prompt: Prompt, cause: str, advice: str | Advice, severity: Severity | None = None) -> Hypothesis:
    return Hypothesis(name, "prompt/format", cause, advice, swap(prompt=prompt), severity)


def with_data(config: Config, options: Options) -> Config:
    """A configuration with other `data` options."""
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


# ------------------------------------------------------------------------ templates

# By name: the start of a conversation, each message, and the generation prompt.
KNOWN = {
    "<|user|>…": ("{bos}", "<|{role}|>{content}{eos}", "<|assistant|>"),
    "Zephyr": ("", "<|{role}|>\n{content}{eos}\n", "<|assistant|>\n"),
    "Phi 3": ("", "<|{role}|>\n{content}<|end|>\n", "<|assistant|>\n"),
    "ChatML": ("", "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    "Llama 3": (
        "{bos}",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": ("{bos}", "<start_of_turn>{role}\n{content}<end_of_turn>\n", "<start_of_turn>model\n"),
    "Mistral": ("{bos}", "[INST] {content} [/INST]", ""),
}
MARK = re.compile(r"<\|[^<>|\n]+\|>|<(?:start|end)_of_turn>|\[/?INST\]")


def known_form(name: str, tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Render messages in a known template, with its generation prompt."""
    head, turn, header = KNOWN[name]
    ends = {"bos": tokenizer.bos_token or "", "eos": tokenizer.eos_token or ""}
    return head.format(**ends) + "".join(turn.format(**message, **ends) for message in messages) + header


def templates(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Templates whose marks are tokens of the tokenizer, with the answer prefix of the run's own prompts."""
    tokenizer: Any = subject.policy.tokenizer
    known, own = tokenizer.get_vocab(), turn_marks(tokenizer, subject.renderer.template)
    opening = own.opening if own is not None and own.fault is None else ""

    def prompt(name: str, problem: Problem) -> Tokens:
        messages = [{key: m[key] for key in ("role", "content")} for m in messages_in(subject.renderer, problem)]
        text = known_form(name, tokenizer, messages) + opening
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))

    for name in KNOWN:
        if all(mark in known for mark in MARK.findall(known_form(name, tokenizer, [{"role": "user", "content": ""}]))):
            yield asked(
                f"after prompts in the {name} template than after the rendered prompts",
                partial(prompt, name),
                "the chat template is not the one that the model was trained with: its marks, its ends of turns or "
                "its answer header differ",
                "use the template that the model was published with (tokenizer.chat_template), or set "
                "data.chat_template to an equivalent template",
            )


def own_templates(subject: KeelSubject) -> Iterator[Hypothesis]:
    """The tokenizer's own template, for prompts that are not rendered with it."""
    template, name = own_template(subject.policy.tokenizer), template_name(subject.policy.tokenizer)
    if template:
        yield asked(
            "in the tokenizer's chat template than after the plain prompts",
            partial(_in_template, subject, template=template),
            "prompts are not rendered with the tokenizer's chat template, although the model answers better with it",
            propose("set {}; no change is needed if plain prompts are intended", {"data.chat_template": name}),
        )


def _in_template(subject: KeelSubject, problem: Problem, template: str) -> Tokens:
    """A prompt in a template, or the prompt unchanged if the template refuses it."""
    tokenizer: Any = subject.policy.tokenizer
    messages = [dict(message) for message in messages_in(subject.renderer, problem)]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template may raise any exception
        return subject.prompt(problem)
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))


def without_system(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Prompts without the system prompt.

    `auto` does not render plain texts without one, so the template is also tried by name.
    """
    text, tokenizer = subject.config.data.system_prompt, subject.policy.tokenizer
    ways: list[dict[str, Any]] = [{"data.system_prompt": None}] if text is not None else []
    if ways and subject.config.data.chat_template == "auto":
        ways.append({"data.system_prompt": None, "data.chat_template": template_name(tokenizer)})
    for options in ways:
        yield asked(
            f"without data.system_prompt={str(text)[:SHOWN]!r}",
            build_renderer(with_data(subject.config, options), tokenizer).prompt,
            "the model was not trained with this system prompt, or not with the chat template that it switches on",
            propose(
                "set {}, or use the system prompt that the model was trained with; no change is needed if it is "
                "intended",
                options,
            ),
        )


# ------------------------------------------------------------------------ prompts without a part

CUTS = 5  # positions tried on either side
FEWEST = 4  # least number of removed tokens; shorter texts may be switches that the model was trained with


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
    """Prompts without one part that the template adds to the messages, for each part."""
    framed = _framed(subject)
    filled = [problem for problem in subject.problems(CHOOSING) if _filled(subject, problem)]
    frames = [frame for frame in map(framed, filled) if frame is not None]
    for name in frames[0].parts() if frames else ():

        def prompt(problem: Problem, name: str = name) -> Tokens:
            frame = framed(problem)
            parts = {} if frame is None else frame.parts()
            return subject.prompt(problem) if frame is None or name not in parts else frame.without(parts[name])

        text = " … ".join(_decoded(subject, frames[0].tokens[a:b]) for a, b in frames[0].parts()[name])
        side = {"before": "before", "words": "around"}.get(name.split()[0], "after")
        yield asked(
            f"without {text[:SHOWN]!r}, which the chat template adds {side} the messages",
            prompt,
            "the template adds text that the model was not trained with, such as another model's system prompt, an "
            "instruction, the start of a thought, quotes around a message, or a repeated mark",
            "remove this text from the template (tokenizer.chat_template), or use the template that the model was "
            "published with (data.chat_template)",
        )


def shared_text(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Prompts without text that all questions share at their start or end, cut at a punctuation mark or in full."""
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
            f"without {text[:SHOWN]!r}, which surrounds every question",
            prompt,
            "the questions have a format that the model was not trained with: page markup, headings, an example, or "
            "an instruction of another dataset",
            "remove this text from the questions, or use the format that the model knows; no change is needed if the "
            "model should learn this format",
        )


def _places(subject: KeelSubject, rows: Sequence[Tokens]) -> list[int]:
    """The numbers of shared first tokens that may be removed; 0 comes first."""
    most = min(map(len, rows)) - 1
    shared = next((i for i in range(most) if len({row[i] for row in rows}) > 1), most)
    texts = [_decoded(subject, [token]) for token in rows[0][:shared]]
    signs = [i + 1 for i, text in enumerate(texts) if not text.strip().isalnum()]
    places = [*dict.fromkeys((*signs, *([shared] if shared else [])))]
    return [0, *reversed(places[:: -max(1, -(-len(places) // CUTS))])]


# ------------------------------------------------------------------------ other wordings

_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_SPELLED = re.compile(rf"\b(?:{'|'.join(_NUMBERS)})\b", re.IGNORECASE)
_MARKUP = re.compile(r"<[^<>]+>|\\(?:begin|end)\{\w*\}|[*_`#$]|\\[a-z]+\{|[{}]")
_LABEL = re.compile(r"^[ \t]*(?:\*\*|__)?[^\W\d]\w*(?: ?\d+)?[.:](?:\*\*|__)?(?:[ \t]+|$)", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])\+?\d+(?:[,_']\d{3})*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?(?![\w.]*\w)")
_JOINED = re.compile(r"(?<=\w)(?:%20|[-_+.,;|/])(?=\w)")
_SIDE_BY_SIDE = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")


def _plainly(number: re.Match[str]) -> str:
    """A number in its shortest form, without trailing zeros after the point or leading zeros."""
    value = float(re.sub(r"[,_']", "", number[0]))
    return str(int(value)) if value.is_integer() else repr(value)


def _shown(text: str) -> str:
    """Normalized Unicode without invisible characters."""
    plain = unicodedata.normalize("NFKC", html.unescape(text))
    return "".join(character for character in plain if unicodedata.category(character) != "Cf")


def _last_alone(text: str) -> str:
    """The text from the last repetition of its first word, for questions that join several rows."""
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
    "without spaces around them": str.strip,
    "with single spaces": lambda t: " ".join(t.split()),
    "without single spaces": lambda t: " ".join(re.sub(r"(?<=\S) (?=\S)", "", t).split()),
    "with spaces in place of signs between words": lambda t: _JOINED.sub(" ", t),
    "with spaces between words and numbers": lambda t: _SIDE_BY_SIDE.sub(" ", t),
}
CUT_SHORT: dict[str, Callable[[str], str]] = {
    "with only the first half of their words": lambda t: " ".join(t.split()[: len(t.split()) // 2]),
    "with only the second half of their words": lambda t: " ".join(t.split()[len(t.split()) // 2 :]),
    "without the text before the last occurrence of their first word": _last_alone,
    "without labels": lambda t: _LABEL.sub("", t).strip(),
    "without their first word": lambda t: " ".join(t.split()[1:]),
    "without their last word": lambda t: " ".join(t.split()[:-1]),
    "with only their first line": lambda t: t.strip().partition("\n")[0],
    "with only their last line": lambda t: t.strip().rpartition("\n")[2],
    "without their first line": lambda t: t.strip().partition("\n")[2],
    "without their last line": lambda t: t.strip().rpartition("\n")[0],
    "from after their first colon": lambda t: t.partition(":")[2].lstrip(),
}


def reworded(problem: Problem, way: Callable[[str], str], *, alone: bool = False) -> Problem:
    """A problem with its last message reworded, `alone` without earlier turns. Unchanged if nothing would be left."""
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
            f"if questions are asked {name}",
            partial(lambda way, problem: subject.prompt(reworded(problem, way)), way),
            "the questions have a wording that the model was not trained with: normalized, marked up, or several "
            "questions in one",
            "use the wording that the model was trained with; no change is needed if the model should learn this "
            "wording",
            **how,
        )


def wordings(subject: KeelSubject) -> Iterator[Hypothesis]:
    yield from _worded(subject, SAID_OTHERWISE)


def shorter(subject: KeelSubject) -> Iterator[Hypothesis]:
    yield from _worded(subject, CUT_SHORT, severity="warning")  # the removed text may be an instruction
    alone = next(_worded(subject, {"with only their last message": str}, severity="warning"))
    prompt = partial(_last_message, subject)
    yield replace(alone, apply=swap(prompt=prompt))


def _last_message(subject: KeelSubject, problem: Problem) -> Tokens:
    return subject.prompt(reworded(problem, str, alone=True))


# ------------------------------------------------------------------------ marks that are not tokens

MARKED = 8  # number of problems whose rendered prompts are searched for marks


def spelled_marks(subject: KeelSubject) -> Iterator[Verdict]:
    """Turn marks that are not tokens, unless gold answers are likelier with them than without the template."""
    tokenizer: Any = subject.policy.tokenizer
    problems = [p for p in subject.problems(MARKED) if subject.answer(p) and _filled(subject, p)]
    spelled = _spelled(subject, problems[0]) if problems else []

    def bare(problem: Problem) -> Tokens:
        text = messages_in(subject.renderer, problem)[-1]["content"]
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if not spelled or _is_own(subject, problems, bare):
        return
    pieces = len(tokenizer.encode(spelled[0], add_special_tokens=False))
    evidence = f"the chat template writes {', '.join(map(repr, spelled))}: {spelled[0]!r} becomes {pieces} tokens"
    yield Verdict.found(
        tokenizer_finding(f"{evidence}, although the vocabulary has it as one token")
        if spelled[0] in tokenizer.get_vocab()
        else finding(
            "prompt/format",
            f"{evidence}, none of which is a special mark, and gold answers are no more likely with the template",
            "the template belongs to another model: this tokenizer has no such token and splits the mark into "
            "ordinary tokens",
            "give a base model plain prompts (data.chat_template=none), or use the template that the model was "
            "published with",
        )
    )


def _spelled(subject: KeelSubject, problem: Problem) -> list[str]:
    """Marks in the rendered prompt, but in no message, that take several tokens."""
    tokenizer: Any = subject.policy.tokenizer
    content = " ".join(message["content"] for message in messages_in(subject.renderer, problem))
    marks = [m for m in dict.fromkeys(MARK.findall(_decoded(subject, subject.prompt(problem)))) if m not in content]
    return [mark for mark in marks if len(tokenizer.encode(mark, add_special_tokens=False)) > 1]


def _is_own(subject: KeelSubject, problems: Sequence[Problem], other: Prompt) -> bool:
    """Whether the model finds answers more likely after its own prompts than after others, beyond chance.

    If too few problems are known to decide this, the answer is yes, since a finding about the template must be certain.
    """
    if not all(other(problem) for problem in problems):
        return True
    ways = subject, subject.swapped(prompt=other)
    own, less = ([float(logp.mean()) for logp in way.answer_logp(problems)] for way in ways)
    if -fmean(own) >= subject.blind:
        return False
    lost = [subject.thresholds["template_gain"] - (a - b) for a, b in zip(own, less, strict=True)]
    return fmean(lost) < 0 or len(lost) < 2 or by_mean(lost) > subject.thresholds["false_alarms"]


# ------------------------------------------------------------------------ the measure


def begun(subject: KeelSubject) -> Iterator[Hypothesis]:
    """Prompts that begin with BOS, if none does now."""
    tokenizer: Any = subject.policy.tokenizer
    bos = tokenizer.bos_token_id
    if bos is not None and not any(bos in subject.prompt(p)[:CUTS] for p in subject.problems(CHOOSING)):
        yield Hypothesis(
            f"after prompts that begin with {tokenizer.bos_token!r}, which none of the run's prompts does",
            "prompt/no-bos",
            "the model was trained on texts that begin with BOS, and the tokenizer or the template omits BOS",
            "let the tokenizer add BOS (add_bos_token), or write BOS at the start of the chat template",
            swap(prompt=lambda problem: (bos, *subject.prompt(problem))),
        )


# In order of priority: the first match is reported. Each gets an equal part of the level of prompt/format.
TABLES: dict[str, Table] = {
    "plain prompts": Table(own_templates, _plain, earns="more"),
    "another template": Table(templates, _filled),
    "BOS": Table(begun, _of_one_turn),
    "a part of the template": Table(template_parts, _filled, foreign=True),
    "the system prompt": Table(without_system, _filled, earns="more"),
    "what questions share": Table(shared_text, _of_one_turn, foreign=True, earns="not less"),
    "the wording": Table(wordings, _of_one_turn, earns="surely more"),
    "a part of the question": Table(shorter, _of_one_turn, least=0.5, earns="surely more"),
}


def measure_format(subject: KeelSubject) -> Outcome:
    """Whether gold answers become more likely in another template, without parts of the prompt, or reworded."""
    verdicts = list[Verdict]()
    alpha = level(subject.thresholds) / len(TABLES)
    for name, table in TABLES.items():
        if name == "a part of the template":
            verdicts += spelled_marks(subject)
        if not any(verdict.state == "found" for verdict in verdicts):
            verdict, chosen = decide(table, subject, alpha=alpha)
            verdicts.append(verdict)
            subject.tried.update({name: chosen} if chosen is not None else {})
        if any(verdict.state == "found" for verdict in verdicts):
            subject.shared["another template"] = True
            break
    sure = sum(verdict.state == "sound" for verdict in verdicts)
    return Outcome.of(
        "prompt format", verdicts, ((f"prompt format: {sure} kinds of alternative prompts give no improvement"),)
    )


__all__ = ["TABLES", "measure_format"]
