"""GGUF files: check that a file is complete, and load it as a dequantised model."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from keel.base.errors import KeelError
from keel.models.tokenizer import check_eos

# GGUF's value types by number: first the fixed-size ones with their struct formats, then strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Pre-tokenizers that split digits one by one before the byte-level pattern. transformers' reader omits the
# split, which changes spaces before a number: "\n  7" must be ["\n  ", "7"], not ["\n ", " 7"].
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a file (strings and numbers, no arrays) and the file size that its tensors need."""

    values: dict[str, Any]
    bytes_needed: int


def read_header(path: Path) -> GgufHeader:
    """Parse the header and compute the file size that its tensors need."""
    try:
        with path.open("rb") as file:
            return _parse(file)
    except KeelError as error:
        raise KeelError(f"the GGUF file {path} {error}") from error
    except OSError as error:
        raise KeelError(f"cannot read the GGUF file {path}: {error.strerror}") from error
    except (struct.error, LookupError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise KeelError(f"the GGUF file {path} has a damaged or truncated header: download it again") from error


def check_gguf(path: Path) -> GgufHeader:
    """Refuse a file that is not GGUF or is truncated, before loading it."""
    if not path.is_file():
        raise KeelError(f"no GGUF file at {path}: check model.name")
    header = read_header(path)
    size = path.stat().st_size
    if size < header.bytes_needed:
        raise KeelError(f"the GGUF file {path} is truncated ({size} of {header.bytes_needed} bytes): download it again")
    return header


def load_gguf(path: Path, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> tuple[nn.Module, Any]:
    """Load the dequantised model and its tokenizer."""
    header = check_gguf(path)
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise KeelError(f"reading {path} needs the package gguf: pip install gguf") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _repair_digits(tokenizer, header.values.get("tokenizer.ggml.pre"))
    _name_special_tokens(tokenizer, header)
    check_eos(tokenizer, path.name)
    limit = header.values.get(f"{header.values.get('general.architecture')}.context_length")
    if limit:
        tokenizer.model_max_length = int(limit)
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=dtype, attn_implementation=attn_implementation, quantization_config=GgufConfig(dequantize=True)
    )
    model = _dequantized(loaded, dtype, attn_implementation)
    return model, _drop_unembedded_tokens(tokenizer, model.config.vocab_size)  # type: ignore[union-attr, arg-type]


def _dequantized(loaded: Any, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    """The same weights in a model that is not marked as quantised, so that it can be saved and trained."""
    from transformers import AutoModelForCausalLM

    # The reader stores the training run's title as _model_name_or_path, which transformers takes for a path.
    dropped = ("quantization_config", "_model_name_or_path")
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k not in dropped})
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _repair_digits(tokenizer: Any, pre: str | None) -> None:
    """Restore the digit splitting of the file's pre-tokenizer."""
    from tokenizers import pre_tokenizers

    if pre in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _name_special_tokens(tokenizer: Any, header: GgufHeader) -> None:
    """Set BOS, EOS and pad from the ids in the file, because transformers' reader does not set all of them."""
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token_id = header.values.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(token_id)))


def _drop_unembedded_tokens(tokenizer: Any, rows: int) -> Any:
    """Remove the tokens that have no row in the model's embedding.

    The reader gives every byte-level tokenizer GPT-2's <|endoftext|> as unknown token, even if the file has none. A
    byte-level tokenizer never needs an unknown token.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if len(tokenizer) <= rows:
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < rows]
    roles = {key: getattr(tokenizer, key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    special = {key: token for key, token in roles.items() if token and tokenizer.convert_tokens_to_ids(token) < rows}
    rebuilt = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        clean_up_tokenization_spaces=False,
        model_max_length=tokenizer.model_max_length,
        **special,
    )
    rebuilt.chat_template = tokenizer.chat_template
    return rebuilt


def _parse(file: BinaryIO) -> GgufHeader:
    magic = file.read(4)
    if magic != b"GGUF":
        raise KeelError(f"is not a GGUF file (it starts with {magic!r}): check model.name or download it again")
    (version,) = _read(file, "I")
    if version not in (2, 3):
        raise KeelError(f"has GGUF version {version}: convert it to version 2 or 3")
    tensors, pairs = _read(file, "QQ")
    values = {}
    for _ in range(pairs):
        key = _string(file)
        value = _value(file, *_read(file, "I"))
        if value is not None:
            values[key] = value
    ends = [0]
    for _ in range(tensors):
        _string(file)
        (dims,) = _read(file, "I")
        shape = _read(file, f"{dims}Q")
        kind, offset = _read(file, "IQ")
        ends.append(offset + _tensor_bytes(prod(shape), kind))
    alignment = int(values.get("general.alignment", 32))
    start = -(-file.tell() // alignment) * alignment
    return GgufHeader(values, start + max(ends))


def _tensor_bytes(elements: int, kind: int) -> int:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        return 0  # load_gguf reports the missing package
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise KeelError(
            f"holds a tensor of type {kind}, which the installed gguf does not know: update gguf, or get another file"
        ) from error
    return elements // block * size


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack("<" + layout, file.read(struct.calcsize("<" + layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    if length > 1 << 26:
        raise struct.error("a string that is too long")
    data = file.read(length)
    if len(data) < length:
        raise struct.error("a truncated string")
    return data.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """Read one value of the header. Arrays are skipped."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = _read(file, "IQ")
        if inner in _SCALARS:
            file.seek(count * struct.calcsize(_SCALARS[inner]), 1)
        else:
            for _ in range(count):
                _value(file, inner)
        return None
    return _read(file, _SCALARS[kind])[0]
