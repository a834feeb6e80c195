"""What a chat template does to messages, by its text alone."""

from __future__ import annotations

from contextlib import closing

import pytest

from doctor.schooled import schooled_config
from keel.doctor.asking import KNOWN
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes.prompts import probe_prompts
from keel.doctor.probes.verbatim import TALKS, odd_marks, written_wrongly
from keel.doctor.thresholds import load_thresholds
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
ODD = {
    "ends twice": CHAT_TEMPLATE.replace(END, " + eos_token + eos_token }}{% endfor %}"),
    "never ends": CHAT_TEMPLATE.replace(END, " }}{% endfor %}"),
}
# Templates of other makers; marks that the tokenizer does not know are words to it.
SOUND = {
    "its own": CHAT_TEMPLATE,
    **{name: template for name, (_, template) in KNOWN.items()},
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


@pytest.mark.parametrize("name", ODD)
def test_marks_that_are_missing_or_doubled(name: str) -> None:
    used = renderer(ODD[name])
    assert not any(written_wrongly(used, talk) for talk in TALKS)
    assert odd_marks(used, [used.tokenizer.eos_token_id])


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_template_is_silent(name: str) -> None:
    used = renderer(SOUND[name])
    assert not any(written_wrongly(used, talk) for talk in TALKS)
    assert odd_marks(used, [used.tokenizer.eos_token_id]) is None


def test_digits_of_a_date_are_not_the_question() -> None:
    assert written_wrongly(renderer(SOUND["a date before"]), (("user", "2"),)) is None


def test_a_repeated_question_is_the_users_own() -> None:
    talk = (("user", "Again?"), ("assistant", "Yes."), ("user", "Again?"))
    assert written_wrongly(renderer(CHAT_TEMPLATE), talk) is None


def test_the_probe_names_it() -> None:
    capitals = "{{ '<|' + message['role'] + '|>' + (message['content'] | upper) + eos_token }}"
    setup = build_subject(schooled_config("data.chat_template=default"))
    with closing(setup.run):
        setup.policy.tokenizer.chat_template = LOOP + capitals + "{% endfor %}" + GENERATION
        found = probe_prompts(setup, load_thresholds()).findings
        setup.policy.tokenizer.chat_template = CHAT_TEMPLATE
        sound = probe_prompts(setup, load_thresholds()).findings
    assert [f.code for f in found if "otherwise" in f.evidence] == ["prompt/format"]
    assert not [f for f in sound if "the chat template writes" in f.evidence]
