"""The word-level tokenizer: texts of its vocabulary come back exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keel.models.tiny import word_model, word_tokenizer

WORDS = ("What", "is", "?", "<answer>", "</answer>", "#", "12", ".")
TOKENIZER = word_tokenizer(WORDS)
LINES = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join), min_size=1, max_size=4)


@given(LINES, st.sampled_from(["\n", "\n\n"]))
def test_known_words_come_back(lines: list[str], between: str) -> None:
    text = between.join(lines)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(tokens) == text
    assert len(tokens) == sum(len(line.split()) for line in lines) + len(between) * (len(lines) - 1)


def test_other_words_are_unknown_and_the_template_is_used() -> None:
    assert TOKENIZER.encode("What nonsense", add_special_tokens=False)[1] == TOKENIZER.unk_token_id
    chat = TOKENIZER.apply_chat_template([{"role": "user", "content": "What is 12 ?"}], add_generation_prompt=True)
    tokens = chat["input_ids"] if hasattr(chat, "keys") else chat
    assert TOKENIZER.unk_token_id not in tokens
    assert len(tokens) == 1 + 1 + 4 + 1 + 1


def test_equal_seeds_give_equal_models() -> None:
    first, again = (word_model(WORDS, seed=3)[0].state_dict() for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first)


def test_smaller_shapes() -> None:
    model, tokenizer = word_model(WORDS, layers=2, width=64)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.head_dim) == (2, 64, 16)
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 64)
