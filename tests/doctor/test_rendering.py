"""The generation prompt of a chat template, derived from the template's own conversations."""

from __future__ import annotations

import pytest

from doctor.asked import asked
from keel.doctor.asking import KNOWN, MARK, known_form, templates
from keel.doctor.rendering import turn_marks
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.render import TEMPLATES

CHATML = TEMPLATES["chatml"]
HEADER = "{{ '<|im_start|>assistant\\n' }}"

FAULTS = {
    "it opens the user's turn": [
        CHATML.replace("assistant\\n' }}{% endif", "user\\n' }}{% endif"),
        CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|user|>' }}"),
    ],
    "it opens the assistant's turn and ends it at once": [
        CHATML.replace(HEADER, "{{ '<|im_start|>assistant\\n<|im_end|>\\n' }}"),
        CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>' + eos_token }}"),
    ],
    "it opens the assistant's turn twice": [
        CHATML.replace(HEADER, HEADER + HEADER),
        CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><|assistant|>' }}"),
    ],
}
SOUND = [
    CHATML,
    CHAT_TEMPLATE,
    CHATML.replace(HEADER, "{{ '<|im_start|>assistant\\n<think>\\n' }}"),
    CHATML.replace(HEADER, "{{ '<|im_start|>assistant\\nLet us see: ' }}"),  # an answer that is begun for the model
    CHATML.replace(HEADER, "{{ '<|im_start|>assistant' }}"),
    CHATML.replace(HEADER, "{{ '<|im_start|>expert\\n' }}"),
]


@pytest.mark.parametrize(("fault", "template"), [(fault, t) for fault, all_of in FAULTS.items() for t in all_of])
def test_a_generation_prompt_that_is_not_the_assistants_header(fault: str, template: str) -> None:
    marks = turn_marks(tiny_tokenizer(), template)
    assert marks is not None
    assert marks.fault == fault
    assert marks.doubled == ("twice" in fault)


@pytest.mark.parametrize("template", SOUND)
def test_one_that_is(template: str) -> None:
    marks = turn_marks(tiny_tokenizer(), template)
    assert marks is not None
    assert marks.fault is None


def test_a_template_that_refuses_conversations_still_tells_its_header() -> None:
    lone = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    marks = turn_marks(tiny_tokenizer(), lone + CHATML)
    assert marks is not None
    assert (marks.assistant, marks.answered, marks.fault) == ("<|im_start|>assistant", "", None)


def rendered(template: str | None = None) -> dict[str, str]:
    """The first problem in each known template whose marks the tokenizer has."""
    subject = asked(template or CHAT_TEMPLATE)
    names = {
        hypothesis.name.split(" template than ")[0].split("in the ")[1]: hypothesis for hypothesis in templates(subject)
    }
    texts = {}
    for name, hypothesis in names.items():
        with hypothesis.apply(subject) as changed:
            texts[name] = subject.policy.tokenizer.decode(list(changed.prompt(subject.problems(1)[0])))
    return texts


def test_known_templates_are_tried_where_the_tokenizer_has_their_marks() -> None:
    texts = rendered()
    assert texts["Zephyr"] == "<|user|>\n0 =<eos>\n<|assistant|>\n"
    assert "ChatML" not in texts  # marks that it lacks


def test_what_a_generation_prompt_begins_of_an_answer_is_begun_in_other_templates_too() -> None:
    zephyr = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    for opening in ("<think>\n", "So: ", ""):
        header = f"{{% if add_generation_prompt %}}{{{{ '<|assistant|>\n{opening}' }}}}{{% endif %}}"
        assert rendered(zephyr + header)["<|user|>…"].endswith(f"0 =<eos><|assistant|>{opening}")


@pytest.mark.parametrize("name", KNOWN)
def test_each_known_form_holds_the_messages_and_its_marks(name: str) -> None:
    text = known_form(
        name, tiny_tokenizer(), [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    )
    assert text.index("first") < text.index("second")
    assert MARK.search(text)
    assert "{" not in text
