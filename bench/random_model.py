"""A random Llama of 19M parameters with a word-level tokenizer, for jobs whose time does not depend on the weights."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 16384
WORDS_BEFORE = ("<pad>", "<bos>", "<eos>", "<unk>")


def save_random_llama(folder: Path, words: tuple[str, ...]) -> None:
    """Write the model and a tokenizer of one token a word, `words` among them, as from_pretrained reads them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    filled = (f"w{number}" for number in range(VOCABULARY - len(WORDS_BEFORE) - len(words)))
    names = (*WORDS_BEFORE, *words, *filled)
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
