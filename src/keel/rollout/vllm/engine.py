"""The engine `vllm`: forward passes by vLLM; requests, noise, stops and log-probabilities by Keel.

The engine drives a `VllmSampler` (`colocated.py`, `client.py`). Rows and results are plain data, sent as JSON over a
network.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn

from keel.base.errors import KeelError
from keel.base.types import Completion
from keel.models.head import causal_lm
from keel.models.tokenizer import eos_ids
from keel.rollout.engine import Answer, Engine
from keel.rollout.request import OpenRow, Request, StopStrings, Turn, open_rows
from keel.rollout.sampling import SamplingParams

PROTOCOL = 2  # version of the protocol, equal for client and server
HEARTBEAT_S = 1.0  # seconds between heartbeats; after 30 missing ones, a client considers the server lost
TRAINING = "x-keel-training"  # header: the id of the training, the same for all of its processes
EXTRA = "keel"  # the key in vLLM's `extra_args`
_DRAWING = ("temperature", "top_p", "top_k", "min_p")
_NOT_OF_LOGITS = re.compile(  # config keys that do not affect logits
    r"_.*|architectures|auto_map|dtype|torch_dtype|transformers_version|use_cache|return_dict|output_.*|id2label|"
    r"label2id|problem_type|chunk_size_feed_forward|is_encoder_decoder|initializer_range|summary_.*|.*_token_ids?|"
    r".*dropout.*|.*_pdrop"
)


@dataclass(frozen=True)
class Row:
    """One completion to sample: context, limit, noise key, and the noise position `start`."""

    id: str
    tokens: tuple[int, ...]
    max_new: int
    key: int
    start: int


@dataclass(frozen=True)
class Sampled:
    """A sampled row: tokens and log-probabilities at the sampling temperature, before and after filters."""

    id: str
    tokens: tuple[int, ...]
    sample_logp: tuple[float, ...]
    filtered_logp: tuple[float, ...]


@dataclass(frozen=True)
class Drawing:
    """Sampling parameters and stop rules of a batch."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_is_special: bool
    eos_ids: tuple[int, ...]
    vocabulary: int

    @classmethod
    def of(cls, sampling: SamplingParams, eos_ids: Sequence[int], *, stop_is_special: bool, vocabulary: int) -> Drawing:
        shared = {name: getattr(sampling, name) for name in _DRAWING}
        ends = tuple(sorted({*sampling.stop_ids, *(() if sampling.ignore_eos else eos_ids)}))
        stop = tuple(sampling.stop)
        return cls(**shared, stop=stop, stop_is_special=stop_is_special, eos_ids=ends, vocabulary=vocabulary)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in _DRAWING})


def vllm_prompt(row: Row, salt: str) -> dict[str, Any]:
    """vLLM's prompt of a row; `salt` limits prefix caching to one version of the weights."""
    return {"prompt_token_ids": list(row.tokens), "cache_salt": salt}


def vllm_params(row: Row, drawing: Drawing) -> Any:
    """vLLM's parameters of a row: greedy, since Keel's logits processor draws the token (`sampler.py`).

    Both log-probabilities are requested if they differ. vLLM ignores its own EOS, so only `eos_ids` end a row.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    two = drawing.sampling.filtered or drawing.sampling.greedy
    drawn = {"key": row.key, "start": row.start, "vocabulary": drawing.vocabulary}
    drawn |= {name: getattr(drawing, name) for name in _DRAWING}
    return VllmParams(
        temperature=0.0,
        max_tokens=row.max_new,
        logprobs=2 if two else 0,
        stop=list(drawing.stop),
        stop_token_ids=list(drawing.eos_ids),
        ignore_eos=True,
        detokenize=bool(drawing.stop),
        skip_special_tokens=not drawing.stop_is_special,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={EXTRA: drawn},
    )


def sampled(row_id: str, output: Any) -> Sampled:
    """Convert vLLM's output of a row.

    The chosen token's logprob is the one after filters. Another entry, if any, holds the one before filters.
    """
    tokens = tuple(int(token) for token in output.token_ids)
    after, before = [], []
    for token, numbers in zip(tokens, output.logprobs or (), strict=True):
        chosen = float(numbers[token].logprob)
        others = [float(x.logprob) for other, x in numbers.items() if other != token and x.logprob > -math.inf]
        after.append(chosen)
        before.append(min(others, default=chosen))
    return Sampled(row_id, tokens, tuple(before), tuple(after))


def check_sampled(result: Sampled, vocabulary: int, sampler: str) -> Sampled:
    """Return the result, or raise an error if a token or log-probability is invalid."""
    odd = next((token for token in result.tokens if not 0 <= token < vocabulary), None)
    numbers = (*result.sample_logp, *result.filtered_logp)
    if odd is not None or not all(math.isfinite(logp) for logp in numbers):
        what = "a log-probability that is not finite" if odd is None else f"the token {odd} of {vocabulary}"
        raise KeelError(f"{sampler} returned {what}: its samples cannot be used for training")
    return result


def to_json(rows: Sequence[Row], drawing: Drawing) -> dict[str, Any]:
    """A request as JSON data."""
    return {"rows": [asdict(row) for row in rows], "drawing": asdict(drawing)}


def from_json(data: Mapping[str, Any]) -> tuple[list[Row], Drawing]:
    """Parse a request from JSON data."""
    try:
        rows = [Row(**{**row, "tokens": tuple(map(int, row["tokens"]))}) for row in data["rows"]]
        drawing = data["drawing"]
        return rows, Drawing(**{**drawing, "stop": tuple(drawing["stop"]), "eos_ids": tuple(drawing["eos_ids"])})
    except (KeyError, TypeError, ValueError) as error:
        raise KeelError(f"the request cannot be parsed ({type(error).__name__}: {error})") from error


def model_facts(config: Any) -> dict[str, Any]:
    """The transformers options that affect logits, as JSON data; model_type first."""
    text = config.get_text_config()
    options = json.loads(json.dumps(text.to_dict(), default=str))
    return {"model_type": text.model_type, **dict(_flat(options))}


def first_difference(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first option in which two models differ; a missing option counts as off."""
    return next((name for name in {**own, **theirs} if (own.get(name) or None) != (theirs.get(name) or None)), None)


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if _NOT_OF_LOGITS.fullmatch(name):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class SamplerInfo(NamedTuple):
    """A sampler's context length and vocabulary size."""

    context: int
    vocabulary: int


class VllmSampler:
    """Samples rows and returns them in the order in which they end; loads weights."""

    info: SamplerInfo
    notes: tuple[str, ...] = ()  # notes for the run
    read_back: int = 0  # number of tensors verified after the last load

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        """Start sampling rows, in addition to running ones."""
        raise NotImplementedError

    def finished(self) -> list[Sampled]:
        """Wait for and return rows that ended since the last call."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel all running rows."""

    def interrupt(self) -> None:
        """Make `finished` raise `Interrupted` in a waiting thread, if possible."""

    def load(self, policy: nn.Module) -> None:
        """Load the policy's weights and verify them."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free memory for the update."""

    def events(self) -> list[tuple[str, str]]:
        """Events since the last call, as (code, message)."""
        return []

    def close(self) -> None:
        """Close the sampler."""


class VllmEngine(Engine):
    """Samples with vLLM, in this process or behind a server.

    Tokens are drawn with Keel's noise (`sampler.py`): the same seed gives the native engine's completions up to
    rounding, and lost completions can be reproduced.
    """

    def __init__(self, sampler: VllmSampler, model: nn.Module, tokenizer: Any) -> None:
        self.sampler, self.tokenizer, self.notes = sampler, tokenizer, sampler.notes
        self.eos_ids = frozenset(eos_ids(causal_lm(model), tokenizer))
        self.context, self.version = sampler.info.context, 0  # the policy that the sampler has loaded
        self._stops = StopStrings(tokenizer)
        self._numbers = itertools.count()  # row ids are unique, because results of old rows may still arrive

    def sync(self, policy: nn.Module, version: int | None = None) -> None:
        """Send the policy's weights and verify them by reading back."""
        self.sampler.load(policy)
        self.version = version
        self.proven = f"weights read back: all {self.sampler.read_back} tensors of the sampler are the policy's"

    def release(self) -> None:
        """Let the sampler sleep until the next rollout."""
        self.sampler.sleep()

    def events(self) -> list[tuple[str, str]]:
        return self.sampler.events()

    def interrupt(self) -> None:
        self.sampler.interrupt()

    def close(self) -> None:
        self.sampler.close()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, *, seed: int = 0, attempt: int = 0, step: int = 0
    ) -> list[list[Completion]]:
        """Completions of each request, in order; a bad request is refused before anything is sampled."""
        completions: dict[tuple[int, int], Completion] = {}
        order = {id(request): index for index, request in enumerate(requests)}

        def answer(turns: list[Turn]) -> list[Request]:
            completions.update({(order[id(turn.request)], turn.sample): turn.completion for turn in turns})
            return []

        self.converse(requests, sampling, answer, seed=seed, attempt=attempt, step=step)
        return [
            [completions[index, sample] for sample in request.drawn(sampling)] for index, request in enumerate(requests)
        ]

    def converse(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        answer: Answer,
        *,
        seed: int = 0,
        attempt: int = 0,
        step: int = 0,
    ) -> None:
        """Sample multi-turn episodes: each turn is answered when it ends, and its continuation joins the others.

        Completions do not depend on the order in which turns end.
        """
        noise, seen = (seed, attempt, step), set[tuple[str, int, int]]()
        special, vocabulary = self._stops.special_in(sampling.stop), self.sampler.info.vocabulary
        drawing = Drawing.of(sampling, sorted(self.eos_ids), stop_is_special=special, vocabulary=vocabulary)
        waiting = open_rows(requests, sampling, self.check, noise, seen)
        running: dict[str, OpenRow] = {}
        width = sampling.max_batch
        try:
            while waiting or running:
                room = len(waiting) if width is None else width - len(running)
                admitted, waiting = waiting[:room], waiting[room:]
                rows = [_remaining_row(pending, next(self._numbers)) for pending in admitted]
                running |= {row.id: pending for row, pending in zip(rows, admitted, strict=True)}
                if rows:
                    self.sampler.start(rows, drawing)
                ended: list[OpenRow] = []
                for result in self.sampler.finished():
                    pending = running.pop(result.id)
                    self._append(pending, result, sampling)
                    (ended if pending.stop_reason else waiting).append(pending)
                if ended and self.on_finished is not None:
                    self.on_finished(len(ended))
                turns = [pending.turn(self._stops) for pending in ended]
                if turns:
                    waiting = [*open_rows(answer(turns), sampling, self.check, noise, seen), *waiting]
        finally:
            if running:
                self.sampler.cancel()

    def _append(self, row: OpenRow, result: Sampled, sampling: SamplingParams) -> None:
        """Append sampled tokens until Keel's stop rules apply; vLLM may stop earlier or later."""
        if not result.tokens:
            raise KeelError(f"the sampler returned no token for problem {row.request.key!r}")
        for drawn in zip(result.tokens, result.sample_logp, result.filtered_logp, strict=True):
            row.append(drawn, self._stops, sampling, self.eos_ids)
            if row.stop_reason:
                return


def _remaining_row(row: OpenRow, number: int) -> Row:
    """A vLLM row for the rest of a completion; if vLLM stops too early, another one follows."""
    tokens, start = (*row.request.tokens, *row.tokens), row.request.start + len(row.tokens)
    return Row(str(number), tokens, row.limit - len(row.tokens), row.key, start)
