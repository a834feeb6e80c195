"""What a chat template's generation prompt is, by the template's own conversations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from doctor.asked import asked
from doctor.schooled import schooled_config
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.asking import KNOWN, templates
from keel.doctor.probes.gold_likelihood import drawn_golds, gold_or_none
from keel.doctor.rendering import turn_marks
from keel.envs import Task
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
    names = {hypothesis.name.split(" than ")[0].split("form of ")[1]: hypothesis for hypothesis in templates(subject)}
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
    zephyr = KNOWN["Zephyr"][1].removesuffix("{{ '<|assistant|>\\n' }}")
    for opening in ("<think>\n", "So: ", ""):
        header = f"{{% if add_generation_prompt %}}{{{{ '<|assistant|>\n{opening}' }}}}{{% endif %}}"
        assert rendered(zephyr + header)["<|user|>…"].endswith(f"0 =<eos><|assistant|>{opening}")


class Partly(Task):
    """Every third problem has an answer; of the others one refuses, one was never written."""

    def gold(self, problem: Problem) -> str:
        if problem.key == "1":
            raise KeelError("no answer here")
        return super().gold(problem) if problem.key == "2" else "5"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(str(i % 3), "2 + 3 =") for i in range(count)]


def test_problems_without_a_gold_answer_are_left_out() -> None:
    task, config, policy = Partly(), schooled_config(), SimpleNamespace(tokenizer=tiny_tokenizer(), context_length=None)
    assert [gold_or_none(task, problem) for problem in task.sample(3, seed=0, step=0)] == [["5"], None, None]
    setup: Any = SimpleNamespace(run=SimpleNamespace(task=task), config=config, policy=policy, shared={})
    assert len(drawn_golds(setup, 9)) == 3


@pytest.mark.parametrize("name", KNOWN)
def test_each_known_template_holds_the_messages(name: str) -> None:
    marks, template = KNOWN[name]
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    text = tiny_tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.index("first") < text.index("second")
    assert all(mark in text for mark in marks)
