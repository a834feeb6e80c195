"""Models from nothing: their size, their seed, a tokenizer that loses nothing, and the road of a saved GPT-2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.envs.registry import build_task
from keel.models.load import load_model
from keel.models.tiny import CHARACTERS
from keel.recipes.chess.models import chess_124m, chess_tokenizer, gpt2

TOKENIZER = chess_tokenizer()


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_large_one_is_gpt2_but_for_its_vocabulary() -> None:
    model, tokenizer = chess_124m()
    missing = (50_257 - len(tokenizer)) * 768
    assert size(model) + missing == 124_439_808
    assert size(model) == pytest.approx(86e6, rel=0.01)


def test_equal_seeds_give_equal_weights_and_leave_the_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other, third = (gpt2(layers=1, width=32, heads=2, positions=64, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))


@given(st.text(alphabet=CHARACTERS, max_size=60))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize("params", [{"pieces": 3}, {"pieces": 6, "history": 3}, {}])
def test_prompt_and_completion_are_cut_alike_apart_and_joined(params: dict[str, object]) -> None:
    task = build_task("chess_env", **params)
    for problem in task.sample(40, seed=0, step=0):
        gold = task.gold(problem)
        apart = TOKENIZER(problem.prompt)["input_ids"] + TOKENIZER(gold)["input_ids"]
        assert apart == TOKENIZER(str(problem.prompt) + gold)["input_ids"]
        assert TOKENIZER.unk_token_id not in apart


def test_a_saved_gpt2_with_gpt2s_kind_of_tokenizer_loads_by_its_folder(tmp_path: Path) -> None:
    """The road of jrahn/RookWorld-LM-124M: the same architecture and tokenizer class, narrow and made here."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    task = build_task("chess_env")
    problems = task.sample(20, seed=0, step=0)
    core = ByteLevelBPETokenizer()
    rows = [f"{problem.prompt}{task.gold(problem)}" for problem in problems]
    core.train_from_iterator(rows, vocab_size=400, special_tokens=["<|endoftext|>"])
    core.save_model(str(tmp_path))
    tokenizer = GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    end = tokenizer.eos_token_id
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, bos_token_id=end, eos_token_id=end)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    loaded = load_model(str(tmp_path / "model"), device="cpu")
    assert loaded.context_length == 1024
    assert loaded.eos_ids == (end,)
    assert loaded.pad_id == end
    for problem in problems:
        prompt, gold = str(problem.prompt), task.gold(problem)
        ids = loaded.tokenizer(prompt)["input_ids"]
        whole = loaded.tokenizer(prompt + gold)["input_ids"]
        assert whole[: len(ids)] == ids
        assert loaded.tokenizer.decode(whole) == prompt + gold


def test_every_token_has_an_embedding() -> None:
    """A bishop on a rank's first square and the square b7 are one word: it must not leave a gap in the numbers."""
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(len(TOKENIZER)))
    told = TOKENIZER("8/8/8/8/8/8/b7/k1K5 w - - 0 1+-1.0+0+1")["input_ids"]
    assert max(told) < len(TOKENIZER)
