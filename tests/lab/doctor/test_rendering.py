"""What a chat template's generation prompt is, by the template's own conversations."""

from __future__ import annotations

import pytest

from keel.base.types import Problem
from keel.lab.doctor.probes.rendering import turn_marks
from keel.lab.doctor.probes.templates import KNOWN, _by_chance, _rendered
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.render import TEMPLATES, Renderer

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


def test_known_templates_are_tried_where_the_tokenizer_has_their_marks() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3 ="}]
    problems = [Problem("a", messages)]
    own = Renderer(tiny_tokenizer())
    assert _rendered(own, problems, "<|user|>…") == []  # its own
    assert _rendered(own, problems, "ChatML") == []  # marks that it lacks
    (zephyr,) = _rendered(own, problems, "Zephyr")
    expected = "<|system|>\nBe brief.<eos>\n<|user|>\n2 + 3 =<eos>\n<|assistant|>\n"
    assert own.tokenizer.decode(list(zephyr)) == expected


@pytest.mark.parametrize("name", KNOWN)
def test_each_known_template_holds_the_messages(name: str) -> None:
    marks, template = KNOWN[name]
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    text = tiny_tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.index("first") < text.index("second")
    assert all(mark in text for mark in marks)


def test_a_gain_in_all_is_no_chance_and_a_scatter_is_one() -> None:
    assert _by_chance([0.5, 0.6, 0.4, 0.5, 0.55, 0.45] * 2) < 1e-6
    assert _by_chance([2.0, -1.5, 0.3, -0.6, 1.0, -1.0] * 2) > 0.1
