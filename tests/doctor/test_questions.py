"""Questions that are lost, given away, held out and trained on, or asked outside of the model's template."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from torch import nn

from doctor.schooled import schooled_config
from doctor.test_frames import Judge, setup_of
from keel.base.types import Problem
from keel.doctor.probes import around, rewordings, templates
from keel.doctor.probes.around import around_findings
from keel.doctor.probes.earnings import Earned
from keel.doctor.probes.frames import CHOOSING
from keel.doctor.probes.leaks import leak_findings, system_leaks
from keel.doctor.probes.marks import mark_findings
from keel.doctor.probes.prompts import Prompt, _filled_twice, _leaks, _lost
from keel.doctor.probes.rendering import in_template
from keel.doctor.probes.repeats import contradiction_findings, eval_leak
from keel.doctor.probes.rewordings import reworded_findings
from keel.doctor.probes.templates import plain_findings
from keel.doctor.probes.written_out import written_out_findings
from keel.doctor.thresholds import load_thresholds
from keel.models.tiny import CHAT_TEMPLATE
from keel.run.build import build_renderer

LIMITS = load_thresholds()


class Only(nn.Module):
    """A model that is sure of its answers behind a token, and elsewhere of the pad token."""

    def __init__(self, inner: nn.Module, token: int, pad: int) -> None:
        super().__init__()
        self.inner, self.token, self.pad = inner, token, pad

    def forward(self, input_ids: Any, **options: Any) -> Any:
        logits = self.inner(input_ids, **options).logits
        lost = (input_ids == self.token).int().cumsum(-1) == 0
        logits[lost] = 0.0
        logits[..., self.pad] += 24.0 * lost
        return SimpleNamespace(logits=logits)


MORE, LESS, NONE = Earned(0.0, 0.5, 64, 1e-9, True), Earned(0.5, 0.1, 4, 1.0, False), Earned(0.0, 0.0, 4, 1.0, False)
UNSURE = Earned(0.0, 0.1, 64, 1e-5, True)  # for one test, and not for one of several


@pytest.mark.parametrize(
    ("chat", "earned", "severity"),
    [(True, MORE, "error"), (True, NONE, "warning"), (True, None, "warning"), (True, LESS, None), (False, MORE, None)],
    ids=["proven", "no skill yet", "a judge elsewhere", "plain on purpose", "known either way"],
)
@pytest.mark.parametrize("template", ["none", "auto"])
def test_a_model_that_answers_in_its_template_alone_is_not_asked_without(
    monkeypatch: pytest.MonkeyPatch, chat: bool, earned: Earned | None, severity: str | None, template: str
) -> None:
    setup = setup_of(CHAT_TEMPLATE)
    setup.config = schooled_config(f"data.chat_template={template}")
    tokenizer, sample = setup.policy.tokenizer, setup.run.task.sample
    if chat:
        header = tokenizer.convert_tokens_to_ids("<|assistant|>")
        setup.policy.model = Only(setup.policy.model, header, tokenizer.pad_token_id)
    setup.run.task.sample = lambda count, **draw: [
        Problem(p.key, p.prompt[0]["content"], p.answer) for p in sample(count, **draw)
    ]

    def judged(setup: Any, config: Any, thresholds: Any) -> Earned | None:
        assert in_template(build_renderer(config, tokenizer), Problem("0", "0 ="))
        return earned

    monkeypatch.setattr(templates, "earned_otherwise", judged)
    found = [*plain_findings(setup, LIMITS)]
    assert [(f.code, f.severity) for f in found] == [("prompt/format", severity)] * bool(severity)
    for finding in found:
        assert ("nothing, if plain prompts are meant" in finding.advice) == (severity == "warning")
        ((option,),) = finding.options
        assert in_template(build_renderer(schooled_config(option), tokenizer), Problem("0", "0 ="))


def test_a_template_that_is_used_is_another_test() -> None:
    assert [*plain_findings(setup_of(CHAT_TEMPLATE), LIMITS)] == []


@pytest.mark.parametrize(
    ("form", "irritating", "codes"),
    [
        ("<p>{}</p>", "p", ["prompt/format"]),
        ("** {} **", "*", ["prompt/format"]),
        ("<p>{}</p>", "q", []),
        ("{}", "", []),
    ],
)
@pytest.mark.parametrize("template", ["default", "none"])
def test_what_stands_around_all_questions_and_irritates_is_found(
    monkeypatch: pytest.MonkeyPatch, form: str, irritating: str, codes: list[str], template: str
) -> None:
    setup = surrounded(form, irritating, template)

    def judged(setup: Any, config: Any, thresholds: Any, change: Any) -> Earned:
        for messages in (form.format("7 ="), [{"role": "user", "content": form.format("7 =")}]):
            bare = change(Problem("7", messages)).prompt
            text = bare if isinstance(bare, str) else bare[0]["content"]
            assert text.startswith("7 =")
            assert irritating not in text
        return MORE

    monkeypatch.setattr(around, "earned_otherwise", judged)
    found = [*around_findings(setup, LIMITS)]
    assert [(finding.code, finding.severity) for finding in found] == [(code, "error") for code in codes]


def surrounded(form: str, irritating: str, template: str = "default") -> Any:
    """A model that a sign irritates, and a text around all of its questions."""
    setup = setup_of(CHAT_TEMPLATE, irritating=irritating)
    setup.config, setup.groups = schooled_config(f"data.chat_template={template}"), ()
    sample = setup.run.task.sample

    def drawn(count: int, *, seed: int, step: int) -> list[Problem]:
        plain = sample(count, seed=seed, step=step)
        return [Problem(p.key, form.format(p.prompt[0]["content"]), p.answer) for p in plain]

    setup.run.task.sample = drawn
    return setup


@pytest.mark.parametrize(
    ("form", "earned", "severity"),
    [
        ("<p>{}</p>", None, "warning"),
        ("<p>{}</p>", NONE, "warning"),
        ("<p>{}</p>", LESS, None),
        ("{} /p", None, None),
        ("{} /p", MORE, "error"),
    ],
    ids=["a judge elsewhere", "no skill yet", "meant", "a switch", "a wrong switch"],
)
def test_what_may_be_meant_around_questions_is_a_warning_at_most(
    monkeypatch: pytest.MonkeyPatch, form: str, earned: Earned | None, severity: str | None
) -> None:
    monkeypatch.setattr(around, "earned_otherwise", lambda *options: earned)
    found = [*around_findings(surrounded(form, "p"), LIMITS)]
    assert [(f.code, f.severity) for f in found] == [("prompt/format", severity)] * bool(severity)
    assert all(("nothing, if" in f.advice) == (severity == "warning") for f in found)


def test_what_is_asked_around_questions_is_asked_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()
    scored = around.answer_logp
    monkeypatch.setattr(around, "answer_logp", lambda setup, golds: rows.append(len(golds)) or scored(setup, golds))
    setup = surrounded("<p>{}</p>", "q")
    assert [*around_findings(setup, LIMITS)] == []
    assert max(rows) <= CHOOSING  # nothing is promised, so nothing is tested
    rows.clear()
    assert around.bare_logp(setup) == -math.inf
    assert rows == []  # chosen before
    monkeypatch.setattr(around, "SECONDS", -1.0)
    assert [*around_findings(surrounded("<p>{}</p>", "q"), LIMITS)] == []
    assert rows == [around.FIRST]


def test_the_end_of_what_questions_share_is_tried() -> None:
    setup = setup_of(CHAT_TEMPLATE)
    for text in ("a: b: c: d: e: f: g: h", "a. b", "abc", "!!!!!!!!!!!"):
        tokens = tuple(setup.policy.tokenizer.encode(text, add_special_tokens=False))
        places = around._places(setup, [(*tokens, 0, 0), (*tokens, 1, 1)], len(tokens) + 1)
        assert places[0] == 0
        assert places[-1] == len(tokens)
        assert len(places) <= around.CUTS + 1


def test_plain_prompts_that_are_ended_are_named() -> None:
    for ended in (True, False):
        setup = setup_of(CHAT_TEMPLATE)
        setup.config = schooled_config("data.chat_template=none", "data.allow_control_tokens=true")
        sample = setup.run.task.sample

        def drawn(count: int, *, seed: int, step: int, end: str = "<eos>" * ended, sample: Any = sample) -> Any:
            return [Problem(p.key, f"{p.prompt[0]['content']}{end}", p.answer) for p in sample(count, seed=0, step=0)]

        setup.run.task.sample = drawn
        setup.policy.eos_ids = (setup.policy.tokenizer.eos_token_id,)
        assert [finding.code for finding in mark_findings(setup, LIMITS)] == ["prompt/format"] * ended


@pytest.mark.parametrize(
    ("wording", "earned", "named"),
    [
        (lambda n: " ".join(rewordings._NUMBERS[int(d)] for d in str(n)) + " =", MORE, "numbers in digits"),
        (lambda n: f"{n} = {(7 * n + 3) % 100} =", MORE, "first half"),
        (lambda n: " ".join(rewordings._NUMBERS[int(d)] for d in str(n)) + " =", NONE, None),
        (lambda n: " ".join(rewordings._NUMBERS[int(d)] for d in str(n)) + " =", None, None),
        (lambda n: f"{n} =", MORE, None),
        (lambda n: f"{n}.000 =", MORE, "numbers written plainly"),
        (lambda n: f"{n} =".translate(str.maketrans("0123456789", "OlZEASGTBg")), MORE, "letters read as the digits"),
        (lambda n: f"{n} = {7 * n + 1001}", MORE, "without their last word"),
        (lambda n: f"{n}.000 =", UNSURE, None),
    ],
    ids=[
        *("spelt out", "two questions", "earns no more", "a judge elsewhere", "as it was taught"),
        *("floats", "scanned", "numbers of rows", "earns little more"),
    ],
)
def test_a_wording_that_the_model_knows_better_is_found(
    monkeypatch: pytest.MonkeyPatch, wording: Callable[[int], str], earned: Earned | None, named: str | None
) -> None:
    setup = setup_of(CHAT_TEMPLATE)
    sample = setup.run.task.sample
    setup.run.task.sample = lambda count, **draw: [
        replace(p, prompt=[{"role": "user", "content": wording(int(p.key))}]) for p in sample(count, **draw)
    ]
    monkeypatch.setattr(rewordings, "earned_otherwise", lambda *_: earned)
    found = [*reworded_findings(setup, LIMITS)]
    severity = "warning" if named in ("first half", "without their last word") else "error"  # what leaves words out
    assert [(f.code, f.severity) for f in found] == [("prompt/format", severity)] * bool(named)
    assert not found or (named or "") in found[0].evidence


@pytest.mark.parametrize(
    ("packed", "last"),
    [
        ("max 1 2=2max 3 4=4max 5 6=", "max 5 6="),
        ("max 5 6=", "max 5 6="),
        ("5 6=", "5 6="),
        ("An ant, Ants:", "An ant, Ants:"),
    ],
)
def test_of_rows_that_were_joined_the_last_is_asked(packed: str, last: str) -> None:
    asked = rewordings.reworded(Problem("1", packed), rewordings.WAYS["from where they begin anew"])
    assert asked.prompt == last


@pytest.mark.parametrize(
    ("way", "asked", "other"),
    [
        ("with their numbers written plainly", "add 8.000000 and +7", "add 8 and 7"),
        ("with their numbers written plainly", "add 1,250.50, 1e3 and 007.", "add 1250.5, 1000 and 7."),
        ("with their numbers written plainly", "v1.0.0, 12:30, x2 and -3", "v1.0.0, 12:30, x2 and -3"),
        ("with letters read as the digits they look like", "max Z lO=", "max 2 10="),
        ("without blanks around them", "max 1 2=    ", "max 1 2="),
        ("with single blanks", "max  1\t2=", "max 1 2="),
        ("without single blanks", "m a x  1  2 =", "max 1 2="),
        ("with blanks for the signs between words", "max_1,2=", "max 1 2="),
        ("with blanks between words and numbers", "max12 of3", "max 12 of 3"),
        ("without markup", "\\begin{problem}1 < 2\\end{problem}", "1 < 2"),
        ("without labels", "**Problem.** 1 =\n\n**Solution.**", "1 ="),
        ("in plain characters", "1 &lt; 2\u200b", "1 < 2"),
        ("by their last line", "Sure.\n1 =\n", "1 ="),
        ("without their last line", "1 =\nYours, Ann", "1 ="),
    ],
)
def test_ways_to_ask_change_what_they_say(way: str, asked: str, other: str) -> None:
    assert rewordings.reworded(Problem("1", asked), rewordings.WAYS[way]).prompt == other


def test_of_wordings_that_are_as_good_the_one_that_changes_least_is_named() -> None:
    problems = [Problem("1", "max 1 2=      ")]
    scores = {"by the first half of their words": -0.5, "without single blanks": -0.51, "with single blanks": -0.52}
    assert rewordings._gentlest({**scores, "without their last word": -0.1}, problems) == "without their last word"
    assert rewordings._gentlest(scores, problems) == "with single blanks"
    assert rewordings._gentlest({}, problems) == ""


def test_messages_of_rows_before_are_left_out() -> None:
    earlier = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 ="}]
    problem = Problem("2", [*earlier, {"role": "user", "content": "2 ="}])
    alone = rewordings.reworded(problem, rewordings.WAYS["by their last message alone"])
    assert alone.prompt == [earlier[0], {"role": "user", "content": "2 ="}]
    assert rewordings.reworded(alone, rewordings.WAYS["by their last message alone"]) is alone


def test_one_answer_to_all_questions_says_nothing_of_them() -> None:
    setup = setup_of(CHAT_TEMPLATE)
    renderer = build_renderer(setup.config, setup.policy.tokenizer)
    assert len(templates.prompt_golds(setup, renderer, 8, filled=True)) == 8
    sample = setup.run.task.sample
    setup.run.task.gold_turns = lambda problem: ["5"]
    assert templates.prompt_golds(setup, renderer, 8, filled=True) == []
    assert len({p.key for p in sample(8, seed=0, step=0)}) > 1


@pytest.mark.parametrize(
    ("form", "template", "codes"),
    [
        ("<bos><|user|>{}<eos><|assistant|>", "default", ["prompt/format"]),
        ("<bos><|user|>{}<eos><|assistant|>", "none", []),
        ("Which mark is it, <|assistant|> or none? {}", "default", []),
        ("{}", "default", []),
    ],
    ids=["rendered before", "rendered once", "a text about marks", "plain"],
)
def test_messages_that_were_rendered_are_not_put_into_the_template_again(
    form: str, template: str, codes: list[str]
) -> None:
    setup = setup_of(CHAT_TEMPLATE)
    setup.config = schooled_config(f"data.chat_template={template}")
    problems = [Problem(str(n), form.format(n)) for n in range(9)]
    read = [Prompt(problem, (1, 2), str(problem.prompt)) for problem in problems]
    assert [finding.code for finding in _filled_twice(setup, read)] == codes


def test_one_prompt_for_many_answers_asks_nothing() -> None:
    for gaps, codes in ((20, ["data/misaligned"]), (3, [])):
        setup = setup_of(CHAT_TEMPLATE)
        setup.built = SimpleNamespace(judge=Judge())
        rows = [(Problem(f"{n}", f"{n} =", str(n)), (n,)) for n in range(80)]
        rows += [(Problem(f"gap {n}", "nan", str(n)), (3, 3, 3)) for n in range(gaps)]
        setup.shared["steps"] = [rows]
        assert [finding.code for finding in contradiction_findings(setup, LIMITS)] == codes


@pytest.mark.parametrize(
    ("form", "codes"),
    [("  {} Plus one?", ["eval/leak"]), ("{} plus one", ["eval/leak"]), ("{} plus two?", [])],
)
def test_a_copy_in_other_letters_is_a_copy(form: str, codes: list[str]) -> None:
    setup = setup_of(CHAT_TEMPLATE)
    held_out = [Problem(f"h{n}", form.format(n), str(n + 1)) for n in range(20)]
    setup.run.task.held_out = lambda count: held_out[:count]
    setup.shared["steps"] = [[(Problem(f"{n}", f"{n} plus one?", str(n + 1)), (n, 1)) for n in range(40)]]
    found = [*eval_leak(setup, LIMITS)]
    assert [finding.code for finding in found] == codes
    assert all(finding.share == 0.5 for finding in found)  # of what is trained on, by tokens or by text


@pytest.mark.parametrize(
    ("said", "codes"),
    [("The answer is {}", ["prompt/answer-leak"]), ("Hint: {}.", ["prompt/answer-leak"]), ("I have {} apples.", [])],
)
def test_an_answer_is_found_where_tokens_give_no_spaces_back(said: str, codes: list[str]) -> None:
    setup = setup_of(CHAT_TEMPLATE)
    prompts = []
    for n in range(32):
        messages = [{"role": "user", "content": f"{n} times 7?"}, {"role": "assistant", "content": said.format(7 * n)}]
        text = "".join(message["content"].replace(" ", "") for message in messages)
        prompts.append(Prompt(Problem(f"{n}", messages, str(7 * n)), (n,), text))
    assert [finding.code for finding in _leaks(setup, prompts, LIMITS)] == codes


def of_texts(rewrite: Any, limit: int = 100) -> list[Prompt]:
    """Prompts of a token a character between two marks, of short and long questions."""
    questions = [f"min {n}{' 1 1 1' * (n % 3)}" for n in range(10, 42)]
    texts = [f"<q>{rewrite(question)}<a>" for question in questions]
    return [
        Prompt(Problem(question, question), tuple(map(ord, text[:limit])), text[:limit])
        for question, text in zip(questions, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("rewrite", "limit", "code"),
    [
        (str, 14, "prompt/truncated"),
        (str.upper, 14, "prompt/truncated"),
        (lambda text: quote(text) if len(text) > 12 else text, 100, "prompt/no-question"),
        (lambda text: text.encode().hex() if len(text) > 12 else text, 100, "prompt/no-question"),
        (lambda text: "min" if len(text) > 12 else text, 100, "prompt/no-question"),
    ],
    ids=["cut", "cut, in other letters", "as an address", "as bytes", "left out"],
)
def test_a_question_in_another_encoding_is_not_cut(rewrite: Any, limit: int, code: str) -> None:
    (finding,) = _lost(setup_of(CHAT_TEMPLATE), of_texts(rewrite, limit))
    assert finding.code == code


@pytest.mark.parametrize(
    ("form", "severity"),
    [
        ("The answer is {}.", "error"),
        ("Output: {}", "warning"),
        ("The final response is {}", "warning"),
        ("Extract the final response time: {} ms", None),
        ("Copy the output of the sensor: {}", None),
    ],
)
def test_a_word_that_a_text_to_copy_has_too_is_no_proof(form: str, severity: str | None) -> None:
    pairs = [(Problem(f"{n}", form.format(7 * n), str(7 * n)), form.format(7 * n)) for n in range(32)]
    found = [*leak_findings(setup_of(CHAT_TEMPLATE), pairs, LIMITS)]
    assert [(f.code, f.severity) for f in found] == [("prompt/answer-leak", severity)] * bool(severity)
    assert all(("nothing, if" in f.advice) == (severity == "warning") for f in found)


@pytest.mark.parametrize(
    ("system", "severity"),
    [
        ("{answer}", "error"),
        ("The answer: {answer}", "error"),
        ("Reference {answer}, for the grader", "warning"),
        ("Use the word {answer} in your reply.", "warning"),  # what is to be done
        ("{other}", None),  # another problem's
        ("Be brief.", None),
        ("Answer 0, 7, 14, 21 or any other multiple of 7.", None),
        ("Passage {n}: the train left at {answer} with {other} on board.", None),  # a text to read
    ],
)
def test_a_system_message_that_says_the_answer_leaks_it(system: str, severity: str | None) -> None:
    problems = [
        Problem(
            f"{n}",
            [
                {"role": "system", "content": system.format(answer=7 * n, other=7 * ((n + 5) % 32), n=n)},
                {"role": "user", "content": f"{n} times 7?"},
            ],
            str(7 * n),
        )
        for n in range(32)
    ]
    found = [*system_leaks(setup_of(CHAT_TEMPLATE), problems, LIMITS)]
    assert [(f.code, f.severity) for f in found] == [("prompt/answer-leak", severity)] * bool(severity)
    assert all(("nothing, if" in f.advice) == (severity == "warning") for f in found)


def test_a_system_message_that_names_the_choices_leaks_none_however_rare_one_is() -> None:
    def asked(n: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Answer yes or no."}, {"role": "user", "content": f"Is {n} over 3?"}]

    problems = [Problem(f"{n}", asked(n), "yes" if n > 3 else "no") for n in range(32)]
    assert [*system_leaks(setup_of(CHAT_TEMPLATE), problems, LIMITS)] == []


ENCODINGS: dict[str, Callable[[str], str]] = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 in lines": lambda text: base64.encodebytes(3 * text.encode()).decode(),
    "base64 of addresses": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "base32": lambda text: base64.b32encode(text.encode()).decode(),
    "base85": lambda text: base64.b85encode(text.encode()).decode(),
    "hexadecimal digits": lambda text: text.encode().hex(),
    "addresses": quote,
    "forms": quote_plus,
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("form", ["What is {} plus one?", "max {} 3=", "¿Cuánto es {} más uno?"])
def test_questions_in_a_code_are_named(form: str, encode: Callable[[str], str]) -> None:
    problems = [Problem(f"{n}", encode(form.format(n)), f"{n + 1}") for n in range(32)]
    found = [*written_out_findings(problems)]
    assert [(f.code, f.severity) for f in found] == [("prompt/format", "warning")]


def test_questions_that_only_look_like_a_code_are_none() -> None:
    words = ["lemon", "apple", "bread", "candle", "doors", "eagle", "fabric", "garden", "horses", "island", "jungle"]
    random = Random(0)
    for texts in (
        words,
        [f"{n}" for n in range(1000, 1032)],
        [" ".join(f"{random.randrange(20, 80)}" for _ in range(4)) for _ in range(32)],  # numbers to sort
        ["".join(random.choices("ACGT", k=24)) for _ in range(32)],
        [f"{random.getrandbits(64):016x}" for _ in range(32)],
        [f"https://example.org/a%20page/{n}" for n in range(32)],
        [f"What is {n}% of 20?" for n in range(32)],
        ["\n".join(f"{random.randrange(20, 80)}" for _ in range(6)) for _ in range(32)],
        ["\t".join(f"{random.randrange(20, 80)}" for _ in range(6)) for _ in range(32)],
        ["\u3000".join(f"{random.randrange(20, 80)}" for _ in range(6)) for _ in range(32)],
        ["".join(f"{random.randrange(20, 80)}" for _ in range(6)) for _ in range(32)],
        ["".join(f"{random.randrange(0x61, 0x7B):02x}" for _ in range(8)) for _ in range(32)],
        [f"/wiki/{n}%20page%20of%20it" for n in range(32)],
        [f"www.example.org/a%20b%20c/{n}" for n in range(32)],
        [f"search?q=red%20shoes%20here&id={n}" for n in range(32)],
        [f"增长10%20个{n}" for n in range(32)],
    ):
        assert [*written_out_findings([Problem(f"{n}", text, "1") for n, text in enumerate(texts)])] == []


@pytest.mark.parametrize("answer", ["some word {}", "SOME WORD {}", "The text is: some word {}"])
def test_a_task_of_decoding_asks_for_what_the_code_says(answer: str) -> None:
    coded = [base64.b64encode(f"some word {n}".encode()).decode() for n in range(16)]
    assert [*written_out_findings([Problem(f"{n}", text, answer.format(n)) for n, text in enumerate(coded)])] == []


def test_a_message_that_says_what_to_do_with_a_code_speaks_for_it() -> None:
    decode = {"role": "system", "content": "Decode the text and answer the question in it."}
    coded = [base64.b64encode(f"What is {n} plus one?".encode()).decode() for n in range(16)]
    problems = [
        Problem(f"{n}", [decode, {"role": "user", "content": text}], f"{n + 1}") for n, text in enumerate(coded)
    ]
    assert [*written_out_findings(problems)] == []


def test_texts_that_look_like_values_are_texts(recwarn: pytest.WarningsRecorder) -> None:
    for form in ("{{{{1, {n}}}, {{3}}}}", "{{[{n}]: 1}}", "['\\d{n}', \"\\(x\"]"):
        assert [*written_out_findings([Problem(f"{n}", form.format(n=n)) for n in range(16)])] == []
    messages = [Problem(f"{n}", str([{"role": "user", "content": f"{n}"}])) for n in range(16)]
    assert [finding.code for finding in written_out_findings(messages)] == ["prompt/format"]
    assert not recwarn.list
