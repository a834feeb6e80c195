"""The built-in models: size, round trip of the tokenizers, equal weights for equal seeds."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.models import load_model
from keel.models.tiny import CHARACTERS, tiny_model, tiny_tokenizer, word_model, word_tokenizer

TOKENIZER = tiny_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_survives_the_round_trip_at_one_token_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_all_printable_ascii_is_there_and_the_rest_is_unknown() -> None:
    assert set(string.printable) - set("\r\x0b\x0c") <= set(CHARACTERS)
    assert TOKENIZER.encode("日") == [TOKENIZER.unk_token_id]


def test_the_chat_template_has_one_bos_and_ends_each_turn_in_eos() -> None:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == "<bos><|user|>1+1?<eos><|assistant|>2<eos>"
    prompt = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER.encode(prompt)
    assert ids.count(TOKENIZER.bos_token_id) == 1
    assert len(ids) == len("1+1?") + 4
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "1+1?"


def test_equal_seeds_give_equal_weights_and_the_random_stream_is_untouched() -> None:
    state = torch.get_rng_state()
    first, second, other = (dict(tiny_model(seed)[0].named_parameters()) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_it_saves_and_loads_as_any_other_model(tmp_path: Path) -> None:
    loaded = load_model("tiny", device="cpu")
    loaded.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.decode(again.encode(CHARACTERS)) == CHARACTERS
    assert again.chat_template == loaded.tokenizer.chat_template
    assert (again.pad_token_id, again.bos_token_id, again.eos_token_id) == (0, 1, 2)
    ids = torch.tensor([again.encode("12 + 30 =")])
    with torch.no_grad():
        expected = loaded.model(input_ids=ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits, expected)
        assert torch.equal(load_model(str(tmp_path), device="cpu").model(input_ids=ids).logits, expected)


WORDS = ("What", "is", "?", "<answer>", "</answer>", "#", "12", ".")
BY_WORD = word_tokenizer(WORDS)
LINES = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join), min_size=1, max_size=4)


@given(LINES, st.sampled_from(["\n", "\n\n"]))
def test_known_words_come_back(lines: list[str], between: str) -> None:
    text = between.join(lines)
    tokens = BY_WORD.encode(text, add_special_tokens=False)
    assert BY_WORD.decode(tokens) == text
    assert len(tokens) == sum(len(line.split()) for line in lines) + len(between) * (len(lines) - 1)


def test_other_words_are_unknown_and_the_template_is_used() -> None:
    assert BY_WORD.encode("What nonsense", add_special_tokens=False)[1] == BY_WORD.unk_token_id
    chat = BY_WORD.apply_chat_template([{"role": "user", "content": "What is 12 ?"}], add_generation_prompt=True)
    tokens = chat["input_ids"] if hasattr(chat, "keys") else chat
    assert BY_WORD.unk_token_id not in tokens
    assert len(tokens) == 1 + 1 + 4 + 1 + 1


def test_equal_seeds_give_equal_word_models() -> None:
    first, again = (word_model(WORDS, seed=3)[0].state_dict() for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first)


def test_smaller_shapes() -> None:
    model, tokenizer = word_model(WORDS, layers=2, width=64)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.head_dim) == (2, 64, 16)
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 64)
