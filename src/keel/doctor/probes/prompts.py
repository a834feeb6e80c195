"""Check that prompts contain the question and the template's marks, but not the answer."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from keel.base.types import Problem
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.measure import Outcome
from keel.doctor.probes.problems import contradiction_findings, eval_leak, leak_findings, repeat_findings, system_leaks
from keel.doctor.rendering import (
    in_template,
    messages_in,
    messages_of,
    own_template,
    rendered,
    survives,
    turn_marks,
    word_by_word,
)
from keel.doctor.replies import squeezed
from keel.rollout.render import Renderer

_LOOKED_AT = 32  # problems of the first step whose prompts are read
# least number of distinct questions, and the share that must have one form, which texts about code sometimes have
_FEWEST, _MOST = 8, 0.9
_GIVEN_ROLES = ("user", "system", "developer")  # roles that templates must write in full; others may be shortened


@dataclass(frozen=True)
class Prompt:
    """A problem, its prompt's tokens, and their text including special tokens."""

    problem: Problem
    tokens: tuple[int, ...]
    text: str


def probe_prompts(setup: KeelSubject) -> Outcome:
    """Decode the prompts and compare them with the problems, with each other and with held-out ones."""
    prompts = _prompts(setup)
    lost = [*_lost(setup, prompts)]
    findings = [
        *lost,
        *(() if lost else _verbatim(setup)),
        *form_findings(setup, [prompt.problem for prompt in prompts]),
        *_headless(setup, prompts),
        *_double_bos(setup, prompts),
        *_leaks(setup, prompts),
        *repeat_findings(setup),
        *contradiction_findings(setup),
        *eval_leak(setup),
    ]
    figures = {"prompts_read": float(len(prompts))}
    return Outcome("prompts", tuple(findings), figures, (f"prompts: {len(prompts)} read back from their tokens",))


def _leaks(setup: KeelSubject, prompts: Sequence[Prompt]) -> list[Finding]:
    """Find answers in the original messages, since decoding may change spaces; otherwise in the rendered prompts."""
    given = [(prompt.problem, "\n".join(m["content"] for m in messages_of(prompt.problem))) for prompt in prompts]
    read = [(prompt.problem, prompt.text) for prompt in prompts]
    return (
        [*system_leaks(setup, [prompt.problem for prompt in prompts])]
        or [*leak_findings(setup, given)]
        or [*leak_findings(setup, read)]
    )


def _prompts(setup: KeelSubject) -> list[Prompt]:
    """The prompts of the batch, and further ones of the first step as training renders them."""
    more = setup.run.task.sample(_LOOKED_AT, seed=setup.config.run.seed, step=0)
    scored = {group.problem.key: (group.problem, group.prompt_tokens) for group in setup.groups}
    pairs = [*scored.values()]
    others = [problem for problem in more if problem.key not in scored]
    pairs += zip(others, rendered(setup, others), strict=True)
    decode = partial(setup.policy.tokenizer.decode, skip_special_tokens=False)
    return [Prompt(problem, tokens, str(decode(list(tokens)))) for problem, tokens in pairs]


def _lost(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """The prompt must contain the problem's text, and different problems must have different prompts."""
    tokenizer, system = setup.policy.tokenizer, setup.config.data.system_prompt
    whole = [prompt for prompt in prompts if "prompt_tokens_cut" not in prompt.problem.info]
    lost: list[tuple[Prompt, str, str]] = []
    for prompt in whole:
        messages = messages_of(prompt.problem)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        for role, content in ((m["role"], m["content"]) for m in messages if m["role"] in _GIVEN_ROLES):
            if not survives(content, prompt.text) and not survives(word_by_word(tokenizer, content), prompt.text):
                lost.append((prompt, role, content))
                break
    if lost:
        yield _lost_finding(whole, lost)
        return
    texts = {str(prompt.problem.prompt) for prompt in whole}
    distinct = {prompt.tokens for prompt in whole}
    if len(texts) > 1 and len(distinct) == 1:
        yield finding(
            "prompt/no-question",
            f"{len(texts)} different problems are rendered to the same prompt: {whole[0].text[-80:]!r}",
            "rendering or encoding loses the difference between the problems",
            "fix the chat template or the tokenizer: every problem's text must be written into its prompt",
        )


def _lost_finding(whole: Sequence[Prompt], lost: Sequence[tuple[Prompt, str, str]]) -> Finding:
    prompt, role, content = lost[0]
    what = "the system prompt" if role == "system" else "the problem's text"
    return finding(
        "prompt/no-question",
        f"{len(lost)} of {len(whole)} prompts do not contain {what}: {content[-60:]!r} became {prompt.text[-80:]!r}",
        f"the chat template drops the content of the {role} message, or the tokenizer drops or truncates it",
        "let the chat template write the content of every message (tokenizer.chat_template, or data.chat_template for "
        "another one)",
    )


def _headless(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that the assistant's header follows the last message, if the template has one.

    A plain text that contains the user's mark of the tokenizer's own template counts as written in that template.
    """
    tokenizer = setup.policy.tokenizer
    filled = [prompt for prompt in prompts if in_template(setup.renderer, prompt.problem)]
    marks = turn_marks(tokenizer, setup.renderer.template if filled else own_template(tokenizer))
    if marks is None or not marks.assistant:
        return
    by_hand = [prompt for prompt in prompts if not filled and marks.user and marks.user in prompt.text]
    header = squeezed(marks.assistant)  # tokenizers drop or add spaces
    if marks.fault and (spoilt := [prompt for prompt in filled if squeezed(prompt.text).endswith(header)]):
        yield finding(
            "prompt/format" if marks.doubled else "prompt/no-header",
            f"{len(spoilt)} of {len(prompts)} prompts end with {marks.assistant!r}, but the same template writes "
            f"{marks.answered!r} before the assistant's messages: {spoilt[0].text[-60:]!r}",
            f"the template's generation prompt is not the assistant's header: {marks.fault}",
            f"end the template with {{% if add_generation_prompt %}} and {marks.answered!r}",
        )
        return

    def is_open(prompt: Prompt) -> bool:
        last, text = messages_of(prompt.problem)[-1], squeezed(prompt.text)
        question = (last["content"].split() or [""])[-1] if filled else squeezed(marks.user)
        asked, opened = text.rfind(question), text.rfind(header)
        return last["role"] == "assistant" or (opened >= 0 and opened + len(header) > asked)

    missing = [prompt for prompt in filled or by_hand if not is_open(prompt)]
    if missing:
        yield finding(
            "prompt/no-header",
            f"{len(missing)} of {len(prompts)} prompts end without {marks.assistant!r}, which opens the assistant's "
            f"turn in the chat template: {missing[0].text[-60:]!r}",
            "the template ignores add_generation_prompt, or the prompt was written without it: the model continues the "
            "user's turn instead of answering",
            f"end the template with {{% if add_generation_prompt %}} and {marks.assistant!r}, or write that at the "
            "prompt's end",
        )


# ------------------------------------------------------------------------ messages in a chat template

Talk = tuple[tuple[str, str], ...]  # (role, text) of each message
# Texts with capitals, repeated spaces, quotes, line breaks and markup, which a filter in a template would change.
_SYSTEM = ("system", 'Be Brief:  say "A" or\n B, if 1 < 2 & 2 > 1.')
_QUESTION = ("user", 'Which Is It:  "C" or\n D, if 3 < 4 & 4 > 3?')
_FURTHER = (("assistant", "It Is Seven."), ("user", "And Is It Eight?"))
TALKS: tuple[Talk, ...] = (
    (_QUESTION,),
    (_SYSTEM, _QUESTION),
    (_QUESTION, *_FURTHER),
    (_SYSTEM, _QUESTION, *_FURTHER),
)
# least characters of a message whose occurrences are counted; a template's date may contain shorter ones
_LEAST_TEXT = 8


def _verbatim(setup: KeelSubject) -> Iterator[Finding]:
    """A chat template must write each message once, unchanged and in order."""
    filled = [group.problem for group in setup.groups if in_template(setup.renderer, group.problem)]
    own = [tuple((m["role"], m["content"]) for m in messages_in(setup.renderer, problem)) for problem in filled[:2]]
    wrong = next((w for talk in (*TALKS, *own) if own and (w := written_wrongly(setup.renderer, talk))), None)
    if wrong is None:
        return
    setup.shared["another template"] = True
    yield finding(
        "prompt/format",
        wrong,
        "the chat template does more than add marks around messages, so the model reads another text than the "
        "problem's",
        "let the template write message['content'] once for each message, in their order, without a filter other than "
        "trim (tokenizer.chat_template, or data.chat_template for another one)",
    )


def written_wrongly(renderer: Renderer, talk: Talk) -> str | None:
    """Describe how a template changes messages; None if it does not, or if it rejects them.

    A missing message is reported elsewhere, and templates may shorten assistant messages.
    """
    tokenizer: Any = renderer.tokenizer
    messages = [{"role": role, "content": content} for role, content in talk]
    options = {"chat_template": renderer.template, "tokenize": False, "add_generation_prompt": True}
    try:
        text = str(tokenizer.apply_chat_template(messages, **options))
    except Exception:  # a template may raise any exception
        return None
    given = [(role, content.strip()) for role, content in talk if role in _GIVEN_ROLES and content.strip()]
    if not all(survives(content, text) for _, content in given):
        return None
    for role, content in given:
        others = "".join(other for _, other in talk).count(content)
        if len(talk) < 3 and content not in text:
            return f"the chat template writes the {role}'s message {content!r} with changes: {text[-120:]!r}"
        if len(content) >= _LEAST_TEXT and text.count(content) > others:
            return f"the chat template writes the {role}'s message {content!r} {text.count(content)} times"
    # a system message may stand before any turn, since some templates write it into the last one
    contents = [content.strip() for role, content in talk if role != "system"]
    place, in_order = 0, True
    for content in contents:
        place = text.find(content, place) + len(content)
        in_order = in_order and place >= len(content)
    if all(content in text for content in contents) and not in_order:
        roles = ", ".join(role for role, _ in talk)
        return f"the chat template writes messages in another order: {roles} becomes {text[-120:]!r}"
    return None


# ------------------------------------------------------------------------ questions in the wrong format

# An HTML entity, or a string escape (followed by lower case it would be LaTeX: \\theta, \\neq).
_ESCAPED = re.compile(
    r"&(?:lt|gt|amp|quot|apos|nbsp|#\d+|#x[0-9a-fA-F]+);|\\(?:n|t|r|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})(?![a-z])"
)
# Typical results of decoding with the wrong encoding, which do not occur in correct text.
_GARBLED = re.compile("[\\x00\\ufffd]|\u00c3[\u0080-\u00bf]|\u00e2\u20ac")


def form_findings(setup: KeelSubject, problems: Sequence[Problem]) -> Iterator[Finding]:
    """Questions that are already rendered, printed as Python literals, escaped, or wrongly decoded."""
    marks = turn_marks(setup.policy.tokenizer, setup.renderer.template)
    user = squeezed(marks.user) if marks is not None and in_template(setup.renderer, problems[0]) else ""
    forms: dict[str, Callable[[str], bool]] = {
        f"rendered already: they contain {user!r}, which opens a turn in their chat template": (
            lambda text: user != "" and user in squeezed(text)
        ),
        "a list of messages or bytes, printed as text": _is_printed,
        "decoded with a wrong encoding": lambda text: _GARBLED.search(text) is not None,
        "escaped, on one line": lambda text: "\n" not in text and _ESCAPED.search(text) is not None,
    }
    asked = [str(messages_of(problem)[-1]["content"] or "") for problem in problems]
    counts = {form: sum(map(test, asked)) for form, test in forms.items()}
    form = next((form for form, count in counts.items() if count > _MOST * len(asked)), None)
    if form is None or len(set(asked)) < _FEWEST:
        return
    setup.shared["another template"] = True
    yield finding(
        "prompt/format",
        f"{counts[form]} of {len(asked)} questions are {form}, such as {next(filter(forms[form], asked))[-80:]!r}",
        "rows were rendered, printed or escaped when they were saved, and not converted back when they were loaded",
        "put messages or plain text into the prompt column (data.columns): parse printed values, and unescape once; "
        "for rendered prompts, set data.chat_template=none and data.allow_control_tokens=true",
        severity=None if form.startswith("rendered") else "warning",
    )


def _is_printed(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes
            value = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    rows = value if isinstance(value, list) else [value]
    return isinstance(value, bytes) or (
        bool(rows) and all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows)
    )


def _double_bos(setup: KeelSubject, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """BOS must not occur twice at the start of a prompt. Missing BOS is tested by the prompt format measure."""
    bos = getattr(setup.policy.tokenizer, "bos_token_id", None)
    doubled = 0 if bos is None else sum(_head(setup, prompt.tokens)[:2] == (bos, bos) for prompt in prompts)
    if doubled:
        yield finding(
            "prompt/double-bos",
            f"{doubled} of {len(prompts)} prompts begin with the BOS token twice",
            "the chat template writes BOS and the tokenizer or the task adds another",
            "remove BOS from the task's prompt or from the chat template (data.chat_template)",
        )


def _head(setup: KeelSubject, tokens: Sequence[int]) -> tuple[int, ...]:
    """The first tokens that are neither padding nor blank."""
    tokenizer = setup.policy.tokenizer
    head, padding = tokens[:8], {tokenizer.pad_token_id} - {tokenizer.bos_token_id}
    blank = [not str(tokenizer.decode([token], skip_special_tokens=False)).strip() for token in head]
    return tuple(t for t, empty in zip(head, blank, strict=True) if not empty and t not in padding)
