"""The scheduler, which decides from counts alone which rows run, join and leave, and the batch of running rows."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from keel.rollout.native.cache import CachedRow, TurnCache
from keel.rollout.request import OpenRow
from keel.rollout.sampling import SamplingParams, block_shape, draw, gumbel

PREFILL_TOKENS = 16384  # prompts are prefilled in chunks of about this many tokens, to bound activations
RESUME_SCORES = 2**25  # attention scores in one chunk of a resumed context, to bound their memory
NOISE_AHEAD = 16  # positions whose noise is computed at once, to save small operations
JOIN_STEPS = 4.0  # cost of a join in decode steps: moving the KV cache
CPU_ROWS = 16  # with more rows, a CPU's step time is proportional to the rows, so empty slots cost little


@dataclass(frozen=True)
class Traits:
    """A decoder's capabilities: `joins` if rows can join, `graphed` if steps are CUDA graphs."""

    device: str = "cpu"
    joins: bool = False
    graphed: bool = False

    def join_steps(self, slots: int) -> float:
        """The cost of a join in decode steps; infinite if rows should not join."""
        if not self.joins or (self.device == "cpu" and slots > CPU_ROWS):
            return math.inf
        return JOIN_STEPS

    def computed(self, live: int) -> int:
        """The number of rows that a step computes if `live` rows are running."""
        return bucket(live) if self.graphed and live else live


def bucket(rows: int) -> int:
    """The graph size for this many rows: 8, 16, 32, 48, 64, 96, 128, 192 and so on."""
    power = max(8, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if power >= 64 and rows <= power * 3 // 4 else power


def buckets(rows: int) -> list[int]:
    """The graph sizes that a rollout of this many rows uses, largest first."""
    return sorted({bucket(count) for count in range(1, rows + 1)}, reverse=True)


class Scheduler:
    """Schedules completions, of which at most `max_batch` (None: all) run at a time.

    The attribute `live` is the number of running rows. The attribute `rows` is the number of rows that a step computes,
    which may include finished ones.
    """

    def __init__(self, rows: int, max_batch: int | None, traits: Traits) -> None:
        self.slots, self.traits = max_batch or rows, traits
        self.rows = self.live = 0
        self._idle_steps = 0.0  # sum over steps of the share of empty slots, since rows last joined

    @property
    def has_room(self) -> bool:
        """Whether slots have been empty long enough to fill them.

        A join moves the KV cache of the other rows. Rows join when empty slots have cost as much as a join. The total
        cost is then at most twice the cost of joining at the best time.
        """
        return not self.live or self._idle_steps >= self.traits.join_steps(self.slots)

    def admit(self, waiting: Iterable[int]) -> int:
        """The number of rows that join now. `waiting` are the numbers of rows of the waiting requests, in order.

        A request's rows join together, so that their prompt is prefilled once, unless they exceed the slots.
        """
        room, count = self.slots - self.live, 0
        for rows in waiting:
            if count + rows > room:
                count = room if not count and not self.live else count
                break
            count += rows
        else:
            self._idle_steps = 0.0  # no row waits, so empty slots cost nothing
        if count:
            self._idle_steps = 0.0
            self.live += count
            self.rows = self.traits.computed(self.live)
        return count

    def finish(self, count: int) -> bool:
        """Count finished rows; return whether the decoder should drop them now."""
        self.live -= count
        computed, before = self.traits.computed(self.live), self.rows
        self.rows = computed
        return computed < before

    def step(self) -> None:
        """Count a decode step and the cost of its empty slots."""
        self._idle_steps += 1 - self.live / self.slots


def prefill_chunks(prompts: int, width: int) -> list[int]:
    """The number of prompts in each chunk of prefill."""
    rows = max(1, PREFILL_TOKENS // width)
    return [min(rows, prompts - start) for start in range(0, prompts, rows)]


def resume_columns(rows: int, heads: int, columns: int) -> int:
    """Tokens per row in one chunk of a resumed prefill that attends over `columns` columns."""
    return max(1, RESUME_SCORES // (rows * heads * columns))


@dataclass(frozen=True)
class RolloutPasses:
    """The passes of a rollout: the numbers (prompts, rows) of each prefill, and the rows of each decode step."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]


def simulate(requests: Sequence[tuple[int, int]], max_batch: int | None, traits: Traits) -> RolloutPasses:
    """Simulate the engine for requests of (completions, tokens each)."""
    waiting = deque((rows, length) for rows, length in requests if rows)
    scheduler = Scheduler(sum(rows for rows, _ in waiting), max_batch, traits)
    ends: Counter[int] = Counter()  # number of rows that end at each draw
    draws, prefills, steps = 0, [], []
    while waiting or scheduler.live:
        joining = scheduler.admit(rows for rows, _ in waiting) if scheduler.has_room else 0
        prompts, left = 0, joining
        while left:
            rows, length = waiting.popleft()
            if rows > left:
                waiting.appendleft((rows - left, length))
            ends[draws + max(length, 1)] += min(rows, left)
            prompts, left = prompts + 1, left - min(rows, left)
        if joining:
            prefills.append((prompts, joining))
        draws += 1
        scheduler.finish(ends.pop(draws, 0))
        if scheduler.live:
            steps.append(scheduler.rows)
            scheduler.step()
    return RolloutPasses(tuple(prefills), tuple(steps))


class _PendingTokens:
    """An asynchronous copy of drawn tokens and their log-probabilities `[3, B]` from the device."""

    def __init__(self, rows: list[OpenRow], numbers: Tensor) -> None:
        self.rows = rows
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        self._arrived: Any = None
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[list[float]]:
        """Wait for the copy; return tokens, log-probabilities and filtered log-probabilities."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[list[float]] = self._numbers.tolist()
        return numbers


class DecodeBatch:
    """The running rows. `record` appends drawn tokens and sets the stop_reason of finished rows.

    `stops` are the tokens that end a row. Decoders that draw on the device use them.
    """

    def __init__(
        self,
        decoder: Callable[[], Any],
        turn_cache: TurnCache,
        sampling: SamplingParams,
        scheduler: Scheduler,
        record: Callable[[list[OpenRow], list[list[float]], SamplingParams], None],
        stops: Sequence[int] = (),
    ) -> None:
        self._stops = stops
        self.rows: list[OpenRow] = []  # in the decoder's order; some may have ended
        self.scheduler = scheduler
        self._new_decoder, self._turn_cache, self._sampling, self._record = decoder, turn_cache, sampling, record
        self._decoder: Any = None
        self._logits: Tensor
        self._noise: _Noise | None = None
        self._pending: _PendingTokens | None = None  # drawn and not yet recorded
        self._ended: list[OpenRow] = []

    @property
    def live(self) -> int:
        return self.scheduler.live

    def admit(self, waiting: list[OpenRow]) -> list[OpenRow]:
        """Add as many waiting rows as the scheduler admits; return the others."""
        self._record_pending()
        groups = groupby(waiting, key=lambda row: id(row.request))
        count = self.scheduler.admit(len(list(members)) for _, members in groups)
        if count:
            self._join(waiting[:count])
        return waiting[count:]

    def take_ended(self) -> list[OpenRow]:
        """The rows that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> None:
        """Draw a token for each row and decode it. `take_ended` returns the finished rows."""
        if self._decoder.traits.graphed:
            self._step_ahead()
            return
        assert self._noise is not None
        token, *logp = draw(self._logits, self._sampling, self._noise.next())
        order = self._record_drawn(_PendingTokens(list(self.rows), torch.stack([x.double() for x in (token, *logp)])))
        if self.live:
            live = token if order is None else token[torch.tensor(order, device=token.device)]
            self._logits = self._decoder.step(live)
            self.scheduler.step()

    def _step_ahead(self) -> None:
        """A step by CUDA graphs, which also draw the tokens. The next step starts before the host reads the tokens.

        The device does not wait for the host. If only the host detects a row's end, the row is computed once more.
        """
        unrecorded = 1 if self._pending is None else 2
        last = all(row.stop_reason or len(row.tokens) + unrecorded >= row.limit for row in self.rows)
        drawn = _PendingTokens(list(self.rows), self._decoder.draw_and_step(self._sampling, last=last))
        self._record_pending()
        if self.live:
            self._pending = drawn
            self.scheduler.step()
        if last:
            self._record_pending()

    def _record_pending(self) -> None:
        """Record the tokens of the previous step, unless they are already recorded."""
        drawn, self._pending = self._pending, None
        if drawn is not None:
            self._record_drawn(drawn)

    def _record_drawn(self, drawn: _PendingTokens) -> list[int] | None:
        """Record drawn tokens. If finished rows are dropped, return the old index of each remaining row."""
        running = [row for row in drawn.rows if not row.stop_reason]
        self._record(drawn.rows, drawn.numbers(), self._sampling)
        ended = [row for row in running if row.stop_reason]
        self._ended += ended
        drops = self.scheduler.finish(len(ended))
        if ended:
            self._cache_contexts(ended)
        if not self.live:
            self.rows, self._decoder = [], None
        return self._drop_ended() if drops and self.live else None

    def _drop_ended(self) -> list[int]:
        """Drop finished rows; return the old index of each remaining row."""
        order: list[int] = self._decoder.keep_rows([i for i, row in enumerate(self.rows) if not row.stop_reason])
        self.rows = [self.rows[i] for i in order]
        if self._noise is not None:
            self._noise.keep_rows(order)
        return order

    def _join(self, rows: Sequence[OpenRow]) -> None:
        order = self._drop_ended() if any(row.stop_reason for row in self.rows) else None
        if self._decoder is not None and self._decoder.traits.graphed:
            self._logits = self._decoder.logits()
        elif order is not None:
            self._logits = self._logits[torch.tensor(order, device=self._logits.device)]
        cached = [self._turn_cache.lookup(row.key, row.request.tokens) for row in rows]
        hits = [row for row, past in zip(rows, cached, strict=True) if past]
        misses = [row for row, past in zip(rows, cached, strict=True) if not past]
        for joining, pasts in ((hits, [past for past in cached if past]), (misses, [])):
            if not joining:
                continue
            decoder = self._new_decoder()
            logits = self._prefill(joining, pasts, decoder)
            self.rows = [*self.rows, *joining]
            if self._decoder is None:
                self._decoder, self._logits = decoder, logits
            else:
                self._decoder.join(decoder, max(row.limit - len(row.tokens) for row in self.rows))
                self._logits = torch.cat((self._logits, logits))
        if self._decoder.traits.graphed:
            self._begin_drawing()
        else:
            self._noise = _Noise(self.rows, self._logits, self._sampling)

    def _begin_drawing(self) -> None:
        """Pass the rows' logits and noise keys to a decoder that draws on the device."""
        keys, positions = [row.key for row in self.rows], [row.request.start + len(row.tokens) for row in self.rows]
        left = [row.limit - len(row.tokens) for row in self.rows]
        self._decoder.begin(self._logits, keys, positions, left, self._stops)
        del self._logits

    def _prefill(self, rows: list[OpenRow], pasts: list[CachedRow], decoder: Any) -> Tensor:
        """Prefill rows and return the logits of their next tokens. Either all rows have a cached past, or none."""
        contexts = [row.request.tokens for row in rows]
        # If the rows join a running decoder, `join` allocates their columns.
        length = max(row.limit for row in rows) if self._decoder is None else 1
        logits: Tensor
        if pasts:
            for row, past in zip(rows, pasts, strict=True):
                row.prompt = past.prompt
            logits = decoder.resume(pasts, contexts, length)
            return logits
        prompt_index: dict[tuple[int, ...], int] = {}
        prompt_of = [prompt_index.setdefault(tokens, len(prompt_index)) for tokens in contexts]
        logits = decoder.prefill(list(prompt_index), prompt_of, length)
        if self._turn_cache.limit and decoder.can_resume:
            prompts = decoder.prompt_kv(list(prompt_index))
            for row, index in zip(rows, prompt_of, strict=True):
                row.prompt = prompts[index]
        return logits

    def _cache_contexts(self, ended: list[OpenRow]) -> None:
        """Store finished rows in the turn cache, without their last token, which has no KV."""
        ended_ids = set(map(id, ended))
        for index, row in enumerate(self.rows):
            if id(row) in ended_ids and row.prompt is not None:
                suffix = (*row.request.tokens[len(row.prompt.tokens) :], *row.tokens[:-1])
                kv = self._decoder.row_kv(index)[:, :, :, : len(suffix)]  # the row may have been computed once more
                self._turn_cache.put(row.key, CachedRow(row.prompt, suffix, kv))


class _Noise:
    """The sampling noise of a batch's rows, computed for several positions at a time."""

    def __init__(self, rows: list[OpenRow], logits: Tensor, sampling: SamplingParams) -> None:
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

    def keep_rows(self, order: list[int]) -> None:
        index = torch.tensor(order, device=self.keys.device)
        self.keys, self.starts = self.keys[index], self.starts[index]
        if self.ahead is not None:
            self.ahead = self.ahead[:, index]
