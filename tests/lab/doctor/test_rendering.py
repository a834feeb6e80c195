"""What a chat template's generation prompt is, by the template's own conversations."""

from __future__ import annotations

import pytest

from keel.lab.doctor.probes.rendering import turn_marks
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
