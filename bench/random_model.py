"""Random Llamas with a word-level tokenizer, for jobs whose time does not depend on the weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

WORDS_BEFORE = ("<pad>", "<bos>", "<eos>", "<unk>")
SMALL = {  # 19M parameters
    "vocab_size": 16384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def save_random_llama(
    folder: Path, words: tuple[str, ...], shape: dict[str, int] | None = None, *, dtype: str = "float32"
) -> None:
    """Write the model and a tokenizer of one token a word, `words` among them, as from_pretrained reads them."""
    shape = SMALL if shape is None else shape
    word_tokenizer(words, shape).save_pretrained(folder)
    random_llama(shape, dtype).save_pretrained(folder)


made_of: dict[str, Any] = {}  # words, shape and dtype of `made`, and how many seconds it took


def made() -> tuple[Any, Any]:
    """A model loader, `model.name=random_model:made`: a model that no file holds, and its tokenizer."""
    began = time.perf_counter()
    model = random_llama(made_of["shape"], made_of["dtype"]), word_tokenizer(made_of["words"], made_of["shape"])
    made_of["seconds"] = time.perf_counter() - began
    return model


def word_tokenizer(words: tuple[str, ...], shape: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    filled = (f"w{number}" for number in range(shape["vocab_size"] - len(WORDS_BEFORE) - len(words)))
    names = (*WORDS_BEFORE, *words, *filled)
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def random_llama(shape: dict[str, int], dtype: str) -> Any:
    """The model, on a GPU if there is one and the model is large."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    large = shape["vocab_size"] * shape["hidden_size"] > 2**26  # a GPU draws these weights in a second
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cuda" if large and torch.cuda.is_available() else "cpu"):
            return LlamaForCausalLM(LlamaConfig(**special | shape))
    finally:
        torch.set_default_dtype(default)
