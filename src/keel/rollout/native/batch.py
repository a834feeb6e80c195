"""Rows that are decoded together: those that end leave, those that wait join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from keel.rollout.native.kept import KeptContexts, KeptPrompt, KeptRow
from keel.rollout.native.scheduler import NOISE_AHEAD, Scheduler
from keel.rollout.request import Request
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel


@dataclass(eq=False)
class DecodeRow:
    """One completion being sampled, at most `limit` tokens long."""

    request: Request
    sample: int
    key: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    sample_logp: list[float] = field(default_factory=list)
    filtered_logp: list[float] = field(default_factory=list)
    text: str | None = None
    stop_reason: str = ""
    prompt: KeptPrompt | None = None  # where its context begins, if it is to be kept itself


class DecodeBatch:
    """The rows that a scheduler lets run; `record` notes what each drew and sets the stop_reason of those done."""

    def __init__(
        self,
        decoder: Callable[[], Any],
        kept: KeptContexts,
        sampling: SamplingParams,
        scheduler: Scheduler,
        record: Callable[[list[DecodeRow], Tensor, Tensor, Tensor, SamplingParams], None],
    ) -> None:
        self.rows: list[DecodeRow] = []  # as the decoder has them; some may have ended
        self.scheduler = scheduler
        self._new_decoder, self._kept, self._sampling, self._record = decoder, kept, sampling, record
        self._decoder: Any = None
        self._logits: Tensor
        self._noise: _Noise

    @property
    def live(self) -> int:
        return self.scheduler.live

    def fill(self, waiting: list[DecodeRow]) -> list[DecodeRow]:
        """Take the first rows that wait, as many as the scheduler admits; returns the others."""
        groups = groupby(waiting, key=lambda row: id(row.request))
        count = self.scheduler.admit(len(list(members)) for _, members in groups)
        if count:
            self._join(waiting[:count])
        return waiting[count:]

    def step(self) -> list[DecodeRow]:
        """Draw a token for each row; returns the rows that have ended with it."""
        before = [row for row in self.rows if not row.stop_reason]
        token, sample_logp, filtered_logp = draw(self._logits, self._sampling, self._noise.next())
        self._record(self.rows, token, sample_logp, filtered_logp, self._sampling)
        ended = [row for row in before if row.stop_reason]
        drops = self.scheduler.end(len(ended))
        if ended:
            self._keep_contexts(ended)
        if not self.live:
            self.rows, self._decoder = [], None
            return ended
        if drops:
            order = torch.tensor(self._drop_ended(), device=token.device)
            token = token[order]
        self._logits = self._decoder.step(token)
        self.scheduler.step()
        return ended

    def _drop_ended(self) -> list[int]:
        """Leave the rows that go on; returns where each stood before."""
        order: list[int] = self._decoder.keep([i for i, row in enumerate(self.rows) if not row.stop_reason])
        self.rows = [self.rows[i] for i in order]
        self._noise.keep(order)
        return order

    def _join(self, rows: Sequence[DecodeRow]) -> None:
        if any(row.stop_reason for row in self.rows):
            self._logits = self._logits[torch.tensor(self._drop_ended(), device=self._logits.device)]
        found = [(row, self._kept.find(row.key, row.request.tokens)) for row in rows]
        pasts = [past for _, past in found if past]
        for part, known in (([row for row, past in found if past], pasts), ([r for r, past in found if not past], [])):
            if not part:
                continue
            decoder = self._new_decoder()
            logits = self._read(part, known, decoder)
            self.rows = [*self.rows, *part]
            if self._decoder is None:
                self._decoder, self._logits = decoder, logits
            else:
                self._decoder.join(decoder, max(row.limit - len(row.tokens) for row in self.rows))
                self._logits = torch.cat((self._logits, logits))
        self._noise = _Noise(self.rows, self._logits, self._sampling)

    def _read(self, rows: list[DecodeRow], pasts: list[KeptRow], decoder: Any) -> Tensor:
        """Read the contexts of rows, all of them with a past that was kept or none; the logits of the first tokens."""
        contexts = [row.request.tokens for row in rows]
        # rows that join others get their room there
        length = max(row.limit for row in rows) if self._decoder is None else 1
        logits: Tensor
        if pasts:
            for row, past in zip(rows, pasts, strict=True):
                row.prompt = past.prompt
            logits = decoder.resume(pasts, contexts, length)
            return logits
        number: dict[tuple[int, ...], int] = {}
        prompt_of = [number.setdefault(tokens, len(number)) for tokens in contexts]
        logits = decoder.start(list(number), prompt_of, length)
        if self._kept.limit and decoder.resumes:
            prompts = decoder.kept_prompts(list(number))
            for row, index in zip(rows, prompt_of, strict=True):
                row.prompt = prompts[index]
        return logits

    def _keep_contexts(self, ended: list[DecodeRow]) -> None:
        """Keep the contexts of rows that have just ended, all but the last token, which was never read."""
        now = set(map(id, ended))
        for index, row in enumerate(self.rows):
            if id(row) in now and row.prompt is not None:
                own = (*row.request.tokens[len(row.prompt.tokens) :], *row.tokens[:-1])
                self._kept.keep(row.key, KeptRow(row.prompt, own, self._decoder.kept_row(index)))


class _Noise:
    """Noise for the rows of a batch, made for several positions at a time."""

    def __init__(self, rows: list[DecodeRow], logits: Tensor, sampling: SamplingParams) -> None:
        device = logits.device
        self.width = 0 if sampling.greedy else sum(block_shape(logits.shape[-1]))
        self.keys = torch.tensor([row.key for row in rows], device=device)
        self.starts = torch.tensor([row.request.start + len(row.tokens) for row in rows], device=device)
        self.position = 0
        self.ahead: Tensor | None = None

    def next(self) -> Tensor | None:
        if not self.width:
            return None
        offset = self.position % NOISE_AHEAD
        if offset == 0 or self.ahead is None:
            first = self.position - offset
            positions = self.starts + torch.arange(first, first + NOISE_AHEAD, device=self.keys.device).unsqueeze(1)
            self.ahead = gumbel(self.keys.expand(NOISE_AHEAD, -1), positions, self.width)
        self.position += 1
        return self.ahead[offset]

    def keep(self, order: list[int]) -> None:
        index = torch.tensor(order, device=self.keys.device)
        self.keys, self.starts = self.keys[index], self.starts[index]
        if self.ahead is not None:
            self.ahead = self.ahead[:, index]
