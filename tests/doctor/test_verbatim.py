"""Effects of a chat template on messages, from its text alone."""

from __future__ import annotations

from contextlib import closing

import pytest

from doctor.schooled import schooled_config
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes.prompts import TALKS, probe_prompts, written_wrongly
from keel.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from keel.rollout.render import TEMPLATES, Renderer

CONTENT, LOOP, END = "message['content']", "{% for message in messages %}", " + eos_token }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
WRONG = {
    "in capitals": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | upper)"),
    "without its spaces": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | replace(' ', ''))"),
    "without its lines": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | replace('\\n', ' '))"),
    "escaped": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | e)"),
    "as JSON": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | tojson)"),
    "twice": CHAT_TEMPLATE.replace(CONTENT, f"{CONTENT} + {CONTENT}"),
    "in the opposite order": CHAT_TEMPLATE.replace(LOOP, "{% for message in messages[::-1] %}"),
}
# Templates of other makers; marks that the tokenizer does not know are words to it.
SOUND = {
    "its own": CHAT_TEMPLATE,
    "chatml": TEMPLATES["chatml"],
    "trimmed": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | trim)"),
    "plain words": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant:' }}",
    "the system prompt in the user's turn": "{% for m in messages %}{{ (m['content'] + '\\n') if m['role'] == 'system' "
    "else ('<|' + m['role'] + '|>' + m['content'] + eos_token) }}{% endfor %}" + GENERATION,
    "nothing but the messages": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "the system prompt in the last turn": "{% for m in messages if m['role'] != 'system' %}"
    "{{ '<|' + m['role'] + '|>' }}"
    "{{ (messages[0]['content'] + '\n') if loop.last and messages[0]['role'] == 'system' else '' }}"
    "{{ m['content'] + eos_token }}{% endfor %}" + GENERATION,
    "a date before": "{{ 'Today Date: 2024-07-27' }}" + CHAT_TEMPLATE,
    "no system prompt": CHAT_TEMPLATE.replace(LOOP, LOOP[:-2] + "if message['role'] != 'system' %}"),
}


def renderer(template: str) -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer, chat_template="default")


@pytest.mark.parametrize("name", WRONG)
def test_messages_that_are_changed(name: str) -> None:
    assert any(written_wrongly(renderer(WRONG[name]), talk) for talk in TALKS)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_template_is_silent(name: str) -> None:
    used = renderer(SOUND[name])
    assert not any(written_wrongly(used, talk) for talk in TALKS)


def test_digits_of_a_date_are_not_the_question() -> None:
    assert written_wrongly(renderer(SOUND["a date before"]), (("user", "2"),)) is None


def test_a_repeated_question_is_the_users_own() -> None:
    talk = (("user", "Again?"), ("assistant", "Yes."), ("user", "Again?"))
    assert written_wrongly(renderer(CHAT_TEMPLATE), talk) is None


@pytest.mark.parametrize("content", [f"({CONTENT} | upper)", CONTENT], ids=["in capitals", "as it is"])
def test_the_probe_names_it(content: str) -> None:
    setup = build_subject(schooled_config("data.chat_template=default"))
    with closing(setup.run):
        turn = f"{{{{ '<|' + message['role'] + '|>' + {content} + eos_token }}}}"
        setup.policy.tokenizer.chat_template = LOOP + turn + "{% endfor %}" + GENERATION
        found = probe_prompts(setup).findings
    written = [finding.code for finding in found if "the chat template writes" in finding.evidence]
    assert written == ["prompt/format"] * (content != CONTENT)
