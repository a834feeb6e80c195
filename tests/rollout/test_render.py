"""Prompts to tokens: templates, BOS, and the seams between turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.models.tiny import CHARACTERS, tiny_tokenizer
from keel.rollout.render import Renderer, fit

CHAT = [{"role": "user", "content": "hi"}]
TOKENIZER = tiny_tokenizer()


def adds_bos() -> Any:
    """A tokenizer that writes BOS by itself, as Llama's does, under a template that writes it too."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    )
    return tokenizer


def text_of(prompt: Any, tokenizer: Any = TOKENIZER, **options: Any) -> str:
    return str(tokenizer.decode(Renderer(tokenizer, **options).prompt(Problem("p", prompt))))


def test_plain_text_stays_plain() -> None:
    assert text_of("12+7=") == "12+7="


def test_messages_go_into_the_template() -> None:
    assert text_of(CHAT) == "<bos><|user|>hi<eos><|assistant|>"


def test_a_system_prompt_comes_first_and_once() -> None:
    expected = "<bos><|system|>be brief<eos><|user|>hi<eos><|assistant|>"
    assert text_of(CHAT, system_prompt="be brief") == expected
    assert text_of("hi", system_prompt="be brief") == expected
    own = [{"role": "system", "content": "mine"}, *CHAT]
    assert text_of(own, system_prompt="be brief") == "<bos><|system|>mine<eos><|user|>hi<eos><|assistant|>"


def test_none_never_uses_a_template() -> None:
    assert text_of(CHAT, chat_template="none", system_prompt="be brief") == "be brief\n\nhi"


def test_a_name_puts_plain_text_in_too() -> None:
    assert text_of("hi", chat_template="chatml") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "short": "{{ messages[0]['content'] }}!"}
    assert text_of("hi", tokenizer, chat_template="short") == "hi!"
    assert text_of(CHAT, tokenizer) == "<bos><|user|>hi<eos><|assistant|>"


def test_a_tokenizer_without_template_gets_the_texts() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert text_of([*CHAT, {"role": "user", "content": "you"}], tokenizer) == "hi\n\nyou"


@pytest.mark.parametrize("prompt", ["12+7=", CHAT])
def test_bos_comes_exactly_once_and_no_eos_after_the_prompt(prompt: Any) -> None:
    tokenizer = adds_bos()
    tokens = Renderer(tokenizer).prompt(Problem("p", prompt))
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens[-1] != tokenizer.eos_token_id


@given(st.text(CHARACTERS, min_size=1).filter(str.strip))
def test_plain_prompts_survive_the_round_trip(text: str) -> None:
    assert text_of(text) == text


@pytest.mark.parametrize("prompt", ["", "  \n", [], [{"role": "user", "content": " "}]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(KeelError, match="'p' has an empty prompt"):
        text_of(prompt)


@pytest.mark.parametrize("prompt", [["hi"], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_malformed_messages_are_refused(prompt: Any) -> None:
    with pytest.raises(KeelError, match="role and a content"):
        text_of(prompt)


def test_an_unknown_template_is_refused_at_once() -> None:
    with pytest.raises(KeelError, match="did you mean 'chatml'"):
        Renderer(TOKENIZER, chat_template="chatlm")


def test_a_template_that_refuses_is_named_in_one_line() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such\nrole') }}"
    with pytest.raises(KeelError, match="refuses the messages of problem 'p': no such"):
        text_of(CHAT, tokenizer)


def test_what_is_said_over_turns_equals_the_whole_conversation() -> None:
    """Prompt, sampled turn and reply, joined as tokens, are what the template writes for all of them at once."""
    renderer = Renderer(TOKENIZER)
    problem = Problem("p", CHAT)
    eos = TOKENIZER.eos_token_id
    sampled = (*TOKENIZER.encode("hello"), eos)
    joined = (*renderer.prompt(problem), *sampled, *renderer.reply(problem, "again", eos))
    whole = [*CHAT, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "again"}]
    assert TOKENIZER.decode(joined) == TOKENIZER.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)


def test_what_a_template_writes_after_eos_is_kept() -> None:
    """Many end a turn in EOS and a newline, of which the model samples only the first."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("+ eos_token", "+ eos_token + '\\n'")
    reply = Renderer(tokenizer).reply(Problem("p", CHAT), "again", tokenizer.eos_token_id)
    assert tokenizer.decode(reply) == "\n<|user|>again<eos>\n<|assistant|>"


def test_a_turn_cut_by_a_stop_string_is_closed_by_the_reply() -> None:
    reply = Renderer(TOKENIZER).reply(Problem("p", CHAT), "again", TOKENIZER.encode("x")[0])
    assert TOKENIZER.decode(reply) == "<eos><|user|>again<eos><|assistant|>"


def test_plain_prompts_get_plain_replies() -> None:
    assert TOKENIZER.decode(Renderer(TOKENIZER).reply(Problem("p", "12="), "no\n", 2)) == "no\n"


def test_a_template_that_forgets_turns_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(KeelError, match="drops the assistant's turns"):
        Renderer(tokenizer).reply(Problem("p", CHAT), "again", None)


def test_long_prompts() -> None:
    assert fit((1, 2, 3), None, "error", "p") == (1, 2, 3)
    assert fit((1, 2, 3), 2, "left", "p") == (2, 3)
    with pytest.raises(KeelError, match="'p' has a prompt of 3 tokens"):
        fit((1, 2, 3), 2, "error", "p")
    with pytest.raises(KeelError, match="truncation"):
        fit((1,), 2, "right", "p")
