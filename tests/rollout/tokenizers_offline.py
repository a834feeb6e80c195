"""Tokenizers of every build that can be made without a download, and chat templates of four families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from keel.models.tiny import tiny_tokenizer, word_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 30 = 42, is it not?",
    "def f(x):\n    return [x] if x > 1 else {'a': x}\n\n\nuser system assistant model tool",
    "<p>Some <b>HTML</b> text</p> <|im|> im_end im_start [INST] start_of_turn eot_id </s>",
] * 4
# A family's markers, and its template; `{end}` closes a turn.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "mistral": (
        ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% else %}[INST] {{ m.content }}[/INST]{% endif %}"
        "{% endfor %}",
    ),
    "gemma": (
        ("<start_of_turn>", "<end_of_turn>"),
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
}
MARKERS = tuple(marker for markers, _ in FAMILIES.values() for marker in markers)


def _trained(model: Any, trainer: Any, pre: Any, decoder: Any, normalizer: Any = None) -> Any:
    core = Tokenizer(model)
    core.pre_tokenizer, core.decoder = pre, decoder
    if normalizer is not None:
        core.normalizer = normalizer
    core.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


def _bytes(normalizer: Any = None) -> Any:
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained(models.BPE(), trainer, pre, decoders.ByteLevel(), normalizer)


def _pieces(model: Any, trainer: Any) -> Any:
    """In the manner of SentencePiece, with a space written before every text."""
    return _trained(model, trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


BUILDS: dict[str, Callable[[], Any]] = {
    "characters": tiny_tokenizer,
    "words": lambda: word_tokenizer(sorted({word for line in CORPUS for word in line.split()})),
    "bytes": _bytes,
    "normalized bytes": lambda: _bytes(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "pieces": lambda: _pieces(
        models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    ),
    "unigram": lambda: _pieces(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>")
    ),
    "unigram with marks": lambda: _trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=250, special_tokens=["<unk>", *MARKERS], unk_token="<unk>"),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        normalizers.NFKC(),
    ),
    "slow": ByT5Tokenizer,
}


def built(build: str, family: str = "chatml", *, special: bool = True, markers: Sequence[str] = MARKERS) -> Any:
    """A tokenizer of this build, with the markers of all families as added tokens and the template of one."""
    tokenizer = BUILDS[build]()
    tokenizer.add_tokens(
        [AddedToken(m, special=special, normalized=not special) for m in markers], special_tokens=special
    )
    tokenizer.chat_template = FAMILIES[family][1]
    return tokenizer
