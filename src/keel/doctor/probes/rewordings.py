"""Questions in a wording that the model knows better than the data's: digits for words, one question for two."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from statistics import fmean

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.earnings import earned_otherwise
from keel.doctor.probes.evidence import level
from keel.doctor.probes.frames import CHOOSING, matters
from keel.doctor.probes.gold_likelihood import Gold, answer_logp, blind_surprise
from keel.doctor.probes.rendering import messages_of
from keel.doctor.probes.templates import SHARED, of_gains, prompt_golds
from keel.doctor.setup import ProbeSetup
from keel.doctor.thresholds import Thresholds
from keel.run.build import build_renderer

Messages = list[dict[str, str]]
Way = Callable[[Messages], Messages]
PROBLEMS = 64  # of which the first choose a wording, and the others test it
PROMISING = 0.01  # chance of the answers' gain under which completions are sampled, which decide
TIE = 0.05  # nats a token within which the problems that choose take wordings for equally good
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_SPELLED = re.compile(rf"\b(?:{'|'.join(_NUMBERS)})\b", re.IGNORECASE)
_MARKUP = re.compile(r"<[^<>]+>|\\(?:begin|end)\{\w*\}|[*_`#$]|\\[a-z]+\{|[{}]")
_LABEL = re.compile(r"^[ \t]*(?:\*\*|__)?[^\W\d]\w*(?: ?\d+)?[.:](?:\*\*|__)?(?:[ \t]+|$)", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])\+?\d+(?:[,_']\d{3})*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?(?![\w.]*\w)")
_SEEN = str.maketrans("OoQDlIiZzEASsGbTBgq", "0000111223455667899")  # letters that a scan takes digits for
_SCANNED = re.compile(r"(?<![^\W_])[OoQDlIiZzEASsGbTBgq\d]+(?![^\W_])")
_JOINED = re.compile(r"(?<=\w)(?:%20|[-_+.,;|/])(?=\w)")
_SIDE_BY_SIDE = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])")


def _half(text: str, second: bool) -> str:
    words = text.split()
    middle = len(words) // 2
    return " ".join(words[middle:] if second else words[:middle])


def _last_alone(text: str) -> str:
    """From the last place at which the first word stands again, as where rows were joined."""
    first = re.match(r"\s*([^\W\d]{2,})", text)
    places = re.finditer(rf"(?<![^\W\d]){re.escape(first[1])}(?![^\W\d])", text) if first else ()
    return text[[place.start() for place in places][-1] :] if first else text


def _plainly(number: re.Match[str]) -> str:
    """A number as it is counted with: without places behind the point that say nothing, nor zeros before it."""
    value = float(re.sub(r"[,_']", "", number[0]))
    return str(int(value)) if value.is_integer() else repr(value)


def _shown(text: str) -> str:
    """In the plain form of every character, without those that are not seen."""
    plain = unicodedata.normalize("NFKC", html.unescape(text))
    return "".join(character for character in plain if unicodedata.category(character) != "Cf")


def _of_last(way: Callable[[str], str]) -> Way:
    return lambda messages: [*messages[:-1], {**messages[-1], "content": way(messages[-1]["content"])}]


def _without_earlier(messages: Messages) -> Messages:
    return [*(message for message in messages[:-1] if message["role"] == "system"), messages[-1]]


WAYS: dict[str, Way] = {
    "with their numbers in digits": _of_last(
        lambda text: _SPELLED.sub(lambda word: str(_NUMBERS.index(word[0].lower())), text)
    ),
    "with their digits in words": _of_last(lambda text: re.sub(r"\d", lambda digit: _NUMBERS[int(digit[0])], text)),
    "by the first half of their words": _of_last(lambda text: _half(text, second=False)),
    "by the second half of their words": _of_last(lambda text: _half(text, second=True)),
    "from where they begin anew": _of_last(_last_alone),
    "by their last message alone": _without_earlier,
    "in lower case": _of_last(str.lower),
    "in plain characters": _of_last(_shown),
    "without markup": _of_last(lambda text: _MARKUP.sub("", text)),
    "without labels": _of_last(lambda text: _LABEL.sub("", text).strip()),
    "with their numbers written plainly": _of_last(lambda text: _NUMBER.sub(_plainly, text)),
    "with letters read as the digits they look like": _of_last(
        lambda text: _SCANNED.sub(lambda word: word[0].translate(_SEEN), text)
    ),
    "without blanks around them": _of_last(str.strip),
    "with single blanks": _of_last(lambda text: " ".join(text.split())),
    "without single blanks": _of_last(lambda text: " ".join(re.sub(r"(?<=\S) (?=\S)", "", text).split())),
    "with blanks for the signs between words": _of_last(lambda text: _JOINED.sub(" ", text)),
    "with blanks between words and numbers": _of_last(lambda text: _SIDE_BY_SIDE.sub(" ", text)),
    "without their first word": _of_last(lambda text: " ".join(text.split()[1:])),
    "without their last word": _of_last(lambda text: " ".join(text.split()[:-1])),
    "by their first line": _of_last(lambda text: text.strip().partition("\n")[0]),
    "by their last line": _of_last(lambda text: text.strip().rpartition("\n")[2]),
    "without their first line": _of_last(lambda text: text.strip().partition("\n")[2]),
    "without their last line": _of_last(lambda text: text.strip().rpartition("\n")[0]),
    "from behind their first colon": _of_last(lambda text: text.partition(":")[2].lstrip()),
}


def reworded_findings(setup: ProbeSetup, thresholds: Thresholds) -> Iterator[Finding]:
    """A wording in which gold answers are likelier and completions of the same problems earn more, beyond chance.

    Answers alone prove nothing: a model that is asked for half of a question may guess the commonest one. They choose
    the wording, on problems of their own, and say whether it is worth samples; what completions earn is the proof.
    """
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    rows = [row for filled in (True, False) for row in prompt_golds(setup, renderer, PROBLEMS, filled=filled)]
    rows = [*{gold: (problem, gold) for problem, gold in rows}.values()]
    first, rest = rows[:CHOOSING], rows[CHOOSING:]
    if len(rest) < CHOOSING:
        return

    def scored(rows: Sequence[tuple[Problem, Gold]], way: Way) -> list[float]:
        asked = [Gold(renderer.prompt(reworded(problem, way)), gold.answer) for problem, gold in rows]
        return answer_logp(setup, asked)

    ways = {name: way for name, way in WAYS.items() if fmean(reworded(p, way) is not p for p, _ in first) > 0.5}
    scores = {name: fmean(scored(first, way)) for name, way in ways.items()}
    best = _gentlest(scores, [problem for problem, _ in first])
    if not best or scores[best] <= fmean(answer_logp(setup, [gold for _, gold in first])):
        return
    golds = [gold for _, gold in rest]
    before, after = answer_logp(setup, golds), scored(rest, WAYS[best])
    gains = [b - a for a, b in zip(before, after, strict=True)]
    chance, blind = of_gains(gains), blind_surprise(setup, thresholds)
    if -fmean(after) >= blind or chance > PROMISING or not matters(golds, before, after, thresholds):
        return
    if _leaves_out(best) and fmean(gains) <= -fmean(before) / 2:
        return  # words that a model does without, as of an instruction, are no fault of the question's
    earned = earned_otherwise(setup, setup.config, thresholds, lambda problem: reworded(problem, WAYS[best]))
    if earned is None or not earned.sure or earned.chance > level(thresholds) / SHARED:
        return
    setup.shared["another template"] = best
    changed = next(problem for problem, _ in first if reworded(problem, WAYS[best]) is not problem)
    asked, other = _text(changed), _text(reworded(changed, WAYS[best]))
    yield finding(
        "prompt/format",
        f"gold answers are {fmean(gains):.2g} nats a token likelier where questions are asked {best} ({len(gains)} "
        f"problems, chance {chance:.1g}), {other[-60:]!r} for {asked[-60:]!r}, and completions earn "
        f"{earned}",
        "the data ask in another wording than the model was taught: normalised, marked up, or several at once",
        "ask as the model was taught; nothing, if it is to learn this wording",
        # as they are asked, answers cannot be known; what leaves words out may leave out what one is told to do
        severity="warning" if -fmean(before) < blind or _leaves_out(best) else None,
    )


def _leaves_out(name: str) -> bool:
    return name.startswith(("by their", "by the", "without their", "without labels", "from "))


def _gentlest(scores: Mapping[str, float], problems: Sequence[Problem]) -> str:
    """Of the ways in which answers are likeliest, up to what few problems leave open, the one that changes least."""
    near = [name for name, score in scores.items() if score >= max(scores.values()) - TIE]

    def kept(name: str) -> float:
        texts = [(_text(problem), _text(reworded(problem, WAYS[name]))) for problem in problems]
        return fmean(SequenceMatcher(None, own, other).quick_ratio() for own, other in texts)

    return near[0] if len(near) == 1 else max(near, key=kept, default="")


def _text(problem: Problem) -> str:
    return " ".join(message["content"] for message in messages_of(problem))


def reworded(problem: Problem, way: Way) -> Problem:
    """A problem whose messages are worded in another way; as it is where that changes nothing or leaves nothing."""
    own = [dict(message) for message in messages_of(problem)]
    messages = way(own)
    if messages == own or not messages[-1]["content"].strip():
        return problem
    return replace(problem, prompt=messages[-1]["content"] if isinstance(problem.prompt, str) else messages)
