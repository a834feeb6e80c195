"""Which rows share a pass: who joins, who leaves, what prefill costs. Decisions from counts alone, without a tensor."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PREFILL_TOKENS = 16384  # prompts are read in chunks of about this many tokens, to bound their activations
RESUME_SCORES = 2**25  # attention scores that one piece of a resumed context may have, for the same reason
NOISE_AHEAD = 16  # positions whose noise is made at once: it costs many small operations
JOIN_STEPS, JOIN_STEPS_GRAPHED = 4.0, 16.0  # what a join costs: moving what was read, and making a graph anew
CARRIED = 0.25  # share of a graph's rows that may have ended and still be computed, where dropping them costs more
CPU_ROWS = 16  # with more places a CPU's step costs by the row, and an empty place hardly anything


@dataclass(frozen=True)
class Traits:
    """What a way to decode can do: let rows join those running (`joins`), run its steps as CUDA graphs (`graphed`)."""

    device: str = "cpu"
    joins: bool = False
    graphed: bool = False

    def join_steps(self, places: int) -> float:
        """What it costs to let rows join those running, in decoding steps; infinite where they never should."""
        if not self.joins or (self.device == "cpu" and places > CPU_ROWS):
            return math.inf
        return JOIN_STEPS_GRAPHED if self.graphed else JOIN_STEPS

    @property
    def carried(self) -> float:
        """The share of rows that may have ended and still be carried along."""
        return CARRIED if self.graphed else 0.0


class Scheduler:
    """Decides for `rows` completions, of which at most `max_batch` (None: all) run at a time.

    `live` counts the rows that run, `rows` those that a step computes: some may have ended.
    """

    def __init__(self, rows: int, max_batch: int | None, traits: Traits) -> None:
        self.places, self.traits = max_batch or rows, traits
        self.rows = self.live = 0
        self._idle = 0.0  # steps, each by the share of places that stood empty, since rows could last join

    @property
    def has_room(self) -> bool:
        """Whether places have stood empty for long enough that filling them is worth it.

        Rows that join cost time: what the others have read is moved. They join once the empty places have cost as much,
        so that the two together are at most twice what the best moment would have cost.
        """
        return not self.live or self._idle >= self.traits.join_steps(self.places)

    def admit(self, waiting: Iterable[int]) -> int:
        """How many rows join now, of requests that wait with these many rows each, in their order.

        A request's rows join together, so that their context is read once, unless they are more than there are places.
        """
        room, count = self.places - self.live, 0
        for rows in waiting:
            if count + rows > room:
                count = room if not count and not self.live else count
                break
            count += rows
        else:
            self._idle = 0.0  # nobody waits any more
        if count:
            self._idle = 0.0
            self.rows = self.live = self.live + count
        return count

    def end(self, count: int) -> bool:
        """Note that rows have ended; whether the decoder should drop them now."""
        self.live -= count
        drops = self.rows - self.live > self.traits.carried * self.rows
        if drops or not self.live:
            self.rows = self.live
        return drops

    def step(self) -> None:
        """Note a decoding step, and what its empty places have cost."""
        self._idle += 1 - self.live / self.places


def prefill_chunks(prompts: int, width: int) -> list[int]:
    """Prompts of `width` tokens in each chunk that is read at once."""
    rows = max(1, PREFILL_TOKENS // width)
    return [min(rows, prompts - start) for start in range(0, prompts, rows)]


def resume_columns(rows: int, heads: int, columns: int) -> int:
    """Tokens of each row that are read at once where contexts go on, over this many columns."""
    return max(1, RESUME_SCORES // (rows * heads * columns))


@dataclass(frozen=True)
class Passes:
    """The passes of a rollout: (prompts, rows) of each prefill, rows of each decoding step that follows one."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]


def simulate(requests: Sequence[tuple[int, int]], max_batch: int | None, traits: Traits) -> Passes:
    """What the engine will do for requests of these many completions with these many tokens each."""
    waiting = deque((rows, length) for rows, length in requests if rows)
    scheduler = Scheduler(sum(rows for rows, _ in waiting), max_batch, traits)
    ends: Counter[int] = Counter()  # rows by the draw that is their last
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
        scheduler.end(ends.pop(draws, 0))
        if scheduler.live:
            steps.append(scheduler.rows)
            scheduler.step()
    return Passes(tuple(prefills), tuple(steps))
