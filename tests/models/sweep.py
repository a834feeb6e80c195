"""All ways in which Keel scores and samples, held against one: the model's own plain forward of a context alone."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.models.pack import pack
from keel.models.probe import probe_packing
from keel.models.rope import reset_rope
from keel.models.scorer import score_tokens
from keel.rollout import Request, SamplingParams
from keel.rollout.native.decode import SharedPrefixDecoder, SwitchingDecoder, UnsharedPrefixDecoder
from keel.rollout.native.engine import NativeEngine
from rollout import shapes

from .architectures import UNBUILT, VOCABULARY, Variant

TOLERANCE = 5e-4  # nats; a lost window, scale or table costs some tenths


@dataclass(frozen=True)
class Outcome:
    """How a model is scored and sampled from, or why it is refused; `error` is the largest |Δ log p| of all ways."""

    scoring: str
    sampling: str
    error: float
    note: str = ""


@torch.no_grad()
def own_logp(model: Any, context: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The oracle: plain forwards of what stands before a token, alone, without a cache, a mask or positions.

    One forward of the whole gives all of them, unless what follows a context changes its logits, as in a model that
    turns to other rotary tables.
    """
    if _length_matters(model):
        logits = torch.stack([_own_logits(model, (*context, *tokens[:i]))[-1] for i in range(len(tokens))])
    else:
        logits = _own_logits(model, (*context, *tokens[:-1]))[len(context) - 1 :]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


_matters: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _length_matters(model: Any) -> bool:
    """Whether the logits after a context differ with what follows it; asked of the model, at many lengths."""
    if model not in _matters:
        tokens = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(4)).tolist()
        whole = _own_logits(model, tokens)
        _matters[model] = any(
            float((_own_logits(model, tokens[:length])[-1] - whole[length - 1]).abs().max()) > 1e-3
            for length in (1, 6, 16, 26, 40)
        )
    return _matters[model]


@torch.no_grad()
def _own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    reset_rope(model)
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def judge(model: Any, seed: int = 0) -> Outcome:
    """Score and sample this model in all ways that Keel would use."""
    draw = random.Random(seed)
    try:
        packing = probe_packing(model, VOCABULARY)
    except KeelError as refusal:
        return Outcome("refused", "refused", 0.0, str(refusal))
    groups = _groups(draw)
    expected = [own_logp(model, g.prompt_tokens, c.tokens) for g in groups for c in g.completions]
    error = max(_scoring_error(model, groups, expected, shared) for shared in {False, packing.ok})
    scoring = "packed" if packing.ok else "padded"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            engine = NativeEngine(model, shapes.tokenizer(), kv_cache_bytes=2**24)
    except KeelError as refusal:
        return Outcome(scoring, "refused", error, str(refusal))
    sampled = _sampling_error(model, engine, draw)
    note = "; ".join(filter(None, (None if packing.ok else packing.reason, engine.fallback_reason)))
    return Outcome(scoring, decoder_name(engine), max(error, sampled), note)


def decoder_name(engine: NativeEngine) -> str:
    decoder: Any = engine._new_decoder()
    prefix = ""
    if isinstance(decoder, SwitchingDecoder):
        prefix, decoder = "switching, ", decoder.inner(engine.model)
    if isinstance(decoder, SharedPrefixDecoder):
        return prefix + ("llama step" if decoder.own_step is not None else "shared prompts")
    assert isinstance(decoder, UnsharedPrefixDecoder)
    if not decoder.cached:
        return prefix + "read again at every step"
    return prefix + ("own cache" if decoder.drop else "own cache, read again when rows end")


def _groups(draw: random.Random) -> list[Group]:
    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(count))

    def completion(count: int) -> Completion:
        zeros = (0.0,) * count
        return Completion(tokens(count), (True,) * count, zeros, zeros, "", "length")

    def group(prompt: int, *lengths: int) -> Group:
        return Group(Problem(f"p{prompt}", ""), tokens(prompt), tuple(completion(n) for n in lengths))

    return [
        group(draw.randrange(2, 6), 3, draw.randrange(7, 12)),
        group(draw.randrange(12, 18), draw.randrange(10, 18), 1, 4),
        group(draw.randrange(32, 44), 2, draw.randrange(5, 9)),
    ]


@torch.no_grad()
def _scoring_error(model: Any, groups: list[Group], expected: list[Tensor], shared: bool) -> float:
    """All groups in few rows, a row a group, and each group alone."""
    whole = torch.cat(expected)
    worst = 0.0
    for row in (None, 64, 256) if shared else (None,):
        packed = pack(groups, 0, shared_prefix=shared, max_row_tokens=row)
        worst = max(worst, _apart(score_tokens(model, packed).logp[packed.completion_mask], whole))
    first = 0
    for group in groups:
        count = len(group.completions)
        packed = pack([group], 0, shared_prefix=shared)
        own = torch.cat(expected[first : first + count])
        worst = max(worst, _apart(score_tokens(model, packed).logp[packed.completion_mask], own))
        first += count
    return worst


def _sampling_error(model: Any, engine: NativeEngine, draw: random.Random) -> float:
    """Rows of different lengths that end at different times and join one another, then a second turn of each."""
    engine.eos_ids = frozenset(draw.sample(range(VOCABULARY), 16))
    prompts = [tuple(draw.randrange(VOCABULARY) for _ in range(n)) for n in (3, draw.randrange(5, 10), 14, 14, 35)]
    requests = [Request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    sampling = SamplingParams(num_generations=2, max_completion_length=14, max_batch=6)
    worst, ended = 0.0, set()
    answers = engine.generate(requests, sampling, seed=1)
    turns = []
    for request, completions in zip(requests, answers, strict=True):
        for sample, completion in enumerate(completions):
            ended.add(len(completion.tokens))
            own = own_logp(model, request.tokens, completion.tokens)
            worst = max(worst, _apart(torch.tensor(completion.sample_logp), own))
            if sample:
                continue
            context = (*request.tokens, *completion.tokens, *prompts[0])
            turns.append(Request(request.key, context, samples=(sample,), start=len(completion.tokens), max_new=5))
    assert len(ended) > 1
    for request, (completion,) in zip(turns, engine.generate(turns, sampling, seed=1), strict=True):
        own = own_logp(model, request.tokens, completion.tokens)
        worst = max(worst, _apart(torch.tensor(completion.sample_logp), own))
    return worst


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).abs().max().nan_to_num(nan=torch.inf))


_HEAD = """# Architectures

`python scripts/architectures.py` writes this page, and `make test-all` checks it. It covers every architecture that
transformers {version} lists as a causal language model. Each model is small and has random weights, and a few dozen
tokens cross its attention windows, chunks and rotary switches. Keel scores each model (shared-prefix rows, padded rows,
groups alone and next to longer ones) and samples from it (rows of different lengths that end at different times, and
second turns). Every log-probability is compared with the model's own plain forward of the same context. The tolerance
is {tolerance} nats. A model that Keel cannot compute correctly is refused when it is loaded.

- **scored** `packed`: shared-prefix rows, with the prompt once per group; `padded`: one row per completion, because the
  model is wrong on shared-prefix rows or takes no positions.
- **sampled** `llama step`: Keel's own decode step for Llama-shaped models; `shared prompts`: the model's forward with
  one copy of each prompt; `own cache`: transformers' cache, with the prompt once per row; `read again …`: that cache is
  wrong or cannot drop rows, so contexts are prefilled again; `switching`: rows on different sides of a rotary switch
  run separately, and a row that crosses the switch is prefilled again.

Some models change all rotary tables with the length of the sequence (LongRoPE beyond
`original_max_position_embeddings`). A token of a finished sequence then has two log-probabilities: one at the length at
which it was drawn, and one at the final length. Keel uses the length at which the token was drawn, in the engine and in
scoring, so that both agree. A batch that crosses the switch is scored by one forward for each side.

| architecture | scored | sampled | why not the fastest path |
| --- | --- | --- | --- |
"""


def page(outcomes: dict[Variant, Outcome]) -> str:
    """docs/architectures.md."""
    rows = [f"| {v} | {o.scoring} | {o.sampling} | {_reason(o.note)} |" for v, o in outcomes.items()]
    unbuilt = [f"- `{name}`: {reason}" for name, reason in sorted(UNBUILT.items())]
    head = _HEAD.format(version=transformers.__version__, tolerance=TOLERANCE)
    return head + "\n".join([*rows, "", "Not built, and therefore not checked:", "", *unbuilt, ""])


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """How each architecture is scored and sampled from, read from the page."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: (row[1], row[2]) for row in cells if row[0] not in ("architecture", "---")}


def _reason(note: str) -> str:
    """The reasons without numbers that differ from one machine to the next."""
    plain = re.sub(r" by up to \S+ nats|: one row per completion", "", note)
    return re.sub(r" \(best guess[^)]*\)", "", plain).replace("|", "/")


__all__ = ["TOLERANCE", "Outcome", "judge", "own_logp", "page", "rows_of"]
