"""What a chat template's generation prompt is, by the template's own conversations."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doctor.schooled import schooled_config
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.doctor.probes import templates
from keel.doctor.probes.gold_likelihood import drawn_golds, gold_or_none
from keel.doctor.probes.rendering import turn_marks
from keel.doctor.probes.templates import KNOWN, _rendered, by_chance, of_gains, template_golds
from keel.envs import Task
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


def test_known_templates_are_tried_where_the_tokenizer_has_their_marks() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3 ="}]
    problems = [Problem("a", messages)]
    own = Renderer(tiny_tokenizer())
    assert _rendered(own, problems, "<|user|>…") == []  # its own
    assert _rendered(own, problems, "ChatML") == []  # marks that it lacks
    (zephyr,) = _rendered(own, problems, "Zephyr")
    expected = "<|system|>\nBe brief.<eos>\n<|user|>\n2 + 3 =<eos>\n<|assistant|>\n"
    assert own.tokenizer.decode(list(zephyr)) == expected


def test_what_a_generation_prompt_begins_of_an_answer_is_begun_in_other_templates_too() -> None:
    problems = [Problem("a", [{"role": "user", "content": "2 + 3 ="}])]
    tokenizer = tiny_tokenizer()
    zephyr = KNOWN["Zephyr"][1].removesuffix("{{ '<|assistant|>\\n' }}")
    for opening in ("<think>\n", "So: ", ""):
        header = f"{{% if add_generation_prompt %}}{{{{ '<|assistant|>\n{opening}' }}}}{{% endif %}}"
        tokenizer.chat_template = zephyr + header
        own = Renderer(tokenizer)
        assert _rendered(own, problems, "Zephyr") == []
        (other,) = _rendered(own, problems, "<|user|>…")
        assert tokenizer.decode(list(other)).endswith(f"2 + 3 =<eos><|assistant|>{opening}")


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
    in_chat = Renderer(policy.tokenizer, chat_template="default")
    assert {problem.key for problem, _ in template_golds(setup, in_chat)} == {"0"}


@pytest.mark.parametrize("name", KNOWN)
def test_each_known_template_holds_the_messages(name: str) -> None:
    marks, template = KNOWN[name]
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    text = tiny_tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.index("first") < text.index("second")
    assert all(mark in text for mark in marks)


def test_a_gain_in_all_is_no_chance_and_a_scatter_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)  # slow to import, and not needed
    assert by_chance([0.5, 0.6, 0.4, 0.5, 0.55, 0.45] * 2) < 1e-6
    assert by_chance([2.0, -1.5, 0.3, -0.6, 1.0, -1.0] * 2) > 0.1


def test_a_gain_of_a_few_without_a_loss_is_no_chance() -> None:
    """As where ids are off by one, and only numbers with a nine in them become other questions."""
    gains = [-0.2] * 30 + [0.1] * 36 + [2.0] * 8 + [30.0] * 8
    assert of_gains(gains) < 1e-4 < by_chance(gains)
    assert of_gains([*gains, *[-11.0] * 8]) > 0.1


def test_the_tests_of_gold_answers_share_one_level() -> None:
    """One for each probe that divides it; what asks of plain prompts and of templates never meets the same problem."""
    probes = Path(templates.__file__).parent.glob("*.py")
    assert sum("/ SHARED" in path.read_text(encoding="utf-8") for path in probes) == templates.SHARED
