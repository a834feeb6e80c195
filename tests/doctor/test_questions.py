"""Questions that are lost, contain their answers, are both held out and trained on, or miss the chat template."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from doctor.asked import asked
from keel.base.types import Problem
from keel.doctor.asking import CUT_SHORT, CUTS, SAID_OTHERWISE, _places, reworded
from keel.doctor.probes.problems import eval_leak, leak_findings, system_leaks
from keel.doctor.probes.prompts import Prompt, _leaks, _lost, form_findings
from keel.models.tiny import CHAT_TEMPLATE


def test_the_end_of_what_questions_share_is_tried() -> None:
    subject = asked()
    for text in ("a: b: c: d: e: f: g: h", "a. b", "abc", "!!!!!!!!!!!"):
        tokens = tuple(subject.policy.tokenizer.encode(text, add_special_tokens=False))
        places = _places(subject, [(*tokens, 0, 0), (*tokens, 1, 1)])
        assert places[0] == 0
        assert places[-1] == len(tokens)
        assert len(places) <= CUTS + 1


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
    asked = reworded(Problem("1", packed), CUT_SHORT["without the text before the last occurrence of their first word"])
    assert asked.prompt == last


@pytest.mark.parametrize(
    ("way", "asked", "other"),
    [
        ("with their numbers written plainly", "add 8.000000 and +7", "add 8 and 7"),
        ("with their numbers written plainly", "add 1,250.50, 1e3 and 007.", "add 1250.5, 1000 and 7."),
        ("with their numbers written plainly", "v1.0.0, 12:30, x2 and -3", "v1.0.0, 12:30, x2 and -3"),
        ("without spaces around them", "max 1 2=    ", "max 1 2="),
        ("with single spaces", "max  1\t2=", "max 1 2="),
        ("without single spaces", "m a x  1  2 =", "max 1 2="),
        ("with spaces in place of signs between words", "max_1,2=", "max 1 2="),
        ("with spaces between words and numbers", "max12 of3", "max 12 of 3"),
        ("without markup", "\\begin{problem}1 < 2\\end{problem}", "1 < 2"),
        ("without labels", "**Problem.** 1 =\n\n**Solution.**", "1 ="),
        ("in plain characters", "1 &lt; 2\u200b", "1 < 2"),
        ("with only their last line", "Sure.\n1 =\n", "1 ="),
        ("without their last line", "1 =\nYours, Ann", "1 ="),
    ],
)
def test_ways_to_ask_change_what_they_say(way: str, asked: str, other: str) -> None:
    assert reworded(Problem("1", asked), {**SAID_OTHERWISE, **CUT_SHORT}[way]).prompt == other


def test_messages_of_rows_before_are_left_out() -> None:
    earlier = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 ="}]
    problem = Problem("2", [*earlier, {"role": "user", "content": "2 ="}])
    assert reworded(problem, str, alone=True).prompt == [earlier[0], {"role": "user", "content": "2 ="}]


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
    setup = asked(CHAT_TEMPLATE, "", (), f"data.chat_template={template}")
    problems = [Problem(str(n), form.format(n)) for n in range(9)]
    assert [finding.code for finding in form_findings(setup, problems)] == codes


@pytest.mark.parametrize(
    ("form", "codes"),
    [("  {} Plus one?", ["eval/leak"]), ("{} plus one", ["eval/leak"]), ("{} plus two?", [])],
)
def test_a_copy_in_other_letters_is_a_copy(form: str, codes: list[str]) -> None:
    setup = asked()
    held_out = [Problem(f"h{n}", form.format(n), str(n + 1)) for n in range(20)]
    setup.run.task.held_out = lambda count: held_out[:count]
    setup.shared["steps"] = [[(Problem(f"{n}", f"{n} plus one?", str(n + 1)), (n, 1)) for n in range(40)]]
    found = [*eval_leak(setup)]
    assert [finding.code for finding in found] == codes
    assert all(finding.share == 0.5 for finding in found)  # of what is trained on, by tokens or by text


@pytest.mark.parametrize(
    ("said", "codes"),
    [("The answer is {}", ["prompt/answer-leak"]), ("Hint: {}.", ["prompt/answer-leak"]), ("I have {} apples.", [])],
)
def test_an_answer_is_found_where_tokens_give_no_spaces_back(said: str, codes: list[str]) -> None:
    setup = asked()
    prompts = []
    for n in range(32):
        messages = [{"role": "user", "content": f"{n} times 7?"}, {"role": "assistant", "content": said.format(7 * n)}]
        text = "".join(message["content"].replace(" ", "") for message in messages)
        prompts.append(Prompt(Problem(f"{n}", messages, str(7 * n)), (n,), text))
    assert [finding.code for finding in _leaks(setup, prompts)] == codes


def of_texts(rewrite: Any, limit: int = 100) -> list[Prompt]:
    """Prompts with one token per character between two marks, for short and long questions."""
    questions = [f"min {n}{' 1 1 1' * (n % 3)}" for n in range(10, 42)]
    texts = [f"<q>{rewrite(question)}<a>" for question in questions]
    return [
        Prompt(Problem(question, question), tuple(map(ord, text[:limit])), text[:limit])
        for question, text in zip(questions, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("rewrite", "limit"),
    [(str, 14), (lambda text: quote(text) if len(text) > 12 else text, 100)],
    ids=["cut", "as an address"],
)
def test_a_question_that_is_cut_or_encoded_is_named(rewrite: Any, limit: int) -> None:
    (finding,) = _lost(asked(), of_texts(rewrite, limit))
    assert finding.code == "prompt/no-question"


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
    found = [*leak_findings(asked(), pairs)]
    assert [(f.code, f.severity) for f in found] == [("prompt/answer-leak", severity)] * bool(severity)
    assert all(("no change is needed" in f.advice) == (severity == "warning") for f in found)


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
    found = [*system_leaks(asked(), problems)]
    assert [(f.code, f.severity) for f in found] == [("prompt/answer-leak", severity)] * bool(severity)
    assert all(("no change is needed" in f.advice) == (severity == "warning") for f in found)


def test_a_system_message_that_names_the_choices_leaks_none_however_rare_one_is() -> None:
    def messages(n: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Answer yes or no."}, {"role": "user", "content": f"Is {n} over 3?"}]

    problems = [Problem(f"{n}", messages(n), "yes" if n > 3 else "no") for n in range(32)]
    assert [*system_leaks(asked(), problems)] == []


def test_texts_that_look_like_values_are_texts(recwarn: pytest.WarningsRecorder) -> None:
    for form in ("{{{{1, {n}}}, {{3}}}}", "{{[{n}]: 1}}", "['\\d{n}', \"\\(x\"]"):
        assert [*form_findings(asked(), [Problem(f"{n}", form.format(n=n)) for n in range(16)])] == []
    messages = [Problem(f"{n}", str([{"role": "user", "content": f"{n}"}])) for n in range(16)]
    assert [finding.code for finding in form_findings(asked(), messages)] == ["prompt/format"]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("What is {0} + {0}?", None),
        ("[{{'role': 'user', 'content': 'What is {0}?'}}]", "messages"),
        ("b'What is {0}?'", "bytes"),
        ("W\x00h\x00a\x00t\x00 \x00i\x00s\x00 \x00{0}", "wrong encoding"),
        ("Combien coÃ»te {0}?", "wrong encoding"),
        ("Combien coûte l'été {0}? São Paulo, naïve, Zürich – 北京", None),
        ("What is it if {0} &lt; {0}1?", "escaped"),
        ("One line.\\nWhat is {0}?", "escaped"),
        ("print('{0}\\n')\nWhat is printed?", None),
        ("[{0}, {0}] is sorted to?", None),
        ("What is $\\theta$ if $\\tan\\theta \\neq {0}$?", None),
        ("{{'role': {0}}} has which keys?", None),
    ],
)
def test_questions_that_are_no_texts_are_named(form: str, named: str | None) -> None:
    findings = [*form_findings(asked(), [Problem(f"{n}", form.format(n)) for n in range(10)])]
    assert [finding.code for finding in findings] == ([] if named is None else ["prompt/format"])
    assert all(named in finding.evidence for finding in findings if named is not None)


def test_a_few_questions_about_markup_are_none() -> None:
    forms = ["What does &lt; stand for, number {}?", "What is {} + 1?"]
    assert [*form_findings(asked(), [Problem(f"{n}", forms[n % 2].format(n)) for n in range(10)])] == []
