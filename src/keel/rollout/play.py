"""Collect groups of a task that plays its own episodes. The episodes' programs call the engine through an endpoint.

An episode has one completion, with one branch per final context of its program. Sampled tokens that the engine did not
draw raise an error. Each sampled token is trained once, and all tokens share the episode's reward.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem
from keel.envs.calls import LOOP, CallFailed, HungCalls
from keel.envs.endpoint import Endpoint, GenerateBody, ModelAccess, context_exceeded
from keel.envs.episode import Key, PlayedEpisode
from keel.rollout.collect import Collector, check_context, judged
from keel.rollout.engine import turn_by_turn
from keel.rollout.render import fit
from keel.rollout.sampling import SamplingParams
from keel.rollout.serving import Call, CallQueue, drive, request_of

AT_ONCE = 256  # episodes played at a time


class EpisodeCalls(CallQueue):
    """The calls of episodes, sampled in an order that does not depend on timing.

    A free slot goes to the episode whose last call ended first. The queue waits until this episode makes its next call
    or ends. There is one slot per `share` unfinished episodes, and at most `at_once`. An episode that makes no call for
    `timeout_s` is cancelled.
    """

    def __init__(self, keys: Sequence[Key], timeout_s: float | None, at_once: int, share: int) -> None:
        super().__init__()
        self.timeout_s, self.at_once, self.share = timeout_s, at_once, share
        self.to_start, self.next_key = deque(keys), iter(keys[AT_ONCE:])
        self.order = list(keys[:AT_ONCE])  # episodes that the engine may continue
        self.known, self.unfinished = set(self.order), len(self.order)
        self.sampled: Counter[Key] = Counter()  # per episode: calls that the engine samples now
        self.unanswered: dict[Key, int] = {}  # per running episode: calls without an answer
        self.ended: set[Key] = set()
        self.playing: dict[Key, asyncio.Task[Any]] = {}
        self.drawn: defaultdict[Key, list[tuple[tuple[int, ...], Completion]]] = defaultdict(list)
        self.late: set[Key] = set()
        self.full: set[Key] = set()  # episodes that ended because their context was full
        self.error: BaseException | None = None

    def begin_next(self, ended: Key | None) -> Key | None:
        """Mark an episode as ended and the next one as running; return it, or None if there are no more."""
        with self.changed:
            if ended is not None:
                del self.unanswered[ended]
                self.ended.add(ended)
                self._queue(ended)  # it may end while a call is sampled, whose answer it no longer waits for
            self.changed.notify_all()
            if not self.to_start or self.closed:
                return None
            key = self.to_start.popleft()
            self.unanswered[key] = 0
            return key

    def finish(self, call: Call, completion: Completion) -> None:
        with self.changed:
            self.sampled[call.owner] -= 1
            self.drawn[call.owner].append((call.request.tokens, completion))
            self._answered(call.owner)
        super().finish(call, completion)

    def take(self, sampling: SamplingParams) -> list[Call]:
        taken: list[Call] = []
        with self.changed:
            while not self.closed and (keys := self._settled()):
                del self.order[: len(keys)]
                joining = [call for key in keys for call in self.waiting if call.owner == key]
                self.waiting = [call for call in self.waiting if call.owner not in keys]
                for call in joining:
                    if call.done.cancelled():  # the episode cancelled only this call
                        self._answered(call.owner)
                    else:
                        self.sampled[call.owner] += 1
                        taken.append(call)
                for _ in self.ended.intersection(keys):
                    if (key := next(self.next_key, None)) is None:
                        self.unfinished -= 1
                    else:
                        self.known.add(key)
                        self._queue(key)
        return taken

    def abort(self, error: BaseException) -> None:
        """End all episodes because of an error."""
        self.error = self.error or error
        self.close()

    def _answered(self, key: Key) -> None:
        if key in self.unanswered:
            self.unanswered[key] -= 1
            self._queue(key)

    def _queue(self, key: Key) -> None:
        if key in self.known and key not in self.order:
            self.order.append(key)

    def _add(self, call: Call) -> None:
        super()._add(call)
        self._queue(call.owner)
        self.unanswered[call.owner] = self.unanswered.get(call.owner, 0) + 1

    def _ready(self) -> bool:
        if self.unanswered:  # there are running episodes
            self._settled()
        return bool(self.waiting)

    def _settled(self) -> list[Key]:
        """Wait until the next episodes for the free slots have made a call or ended; cancel those that time out."""
        room = min(self.at_once, -(-self.unfinished // self.share)) - len(+self.sampled)
        keys = self.order[: max(0, room)]
        end = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        while not self.closed:
            thinking = [key for key in keys if key not in self.ended and not self.unanswered.get(key)]
            if not thinking:
                break
            if self.changed.wait(None if end is None else max(0.0, end - time.monotonic())):
                continue
            if self.late.issuperset(thinking):
                raise KeelError("an environment blocks the event loop: use await in its functions")
            for key in thinking:
                self.late.add(key)
                if (playing := self.playing.get(key)) is not None:
                    playing.get_loop().call_soon_threadsafe(playing.cancel)
            assert self.timeout_s is not None
            end = time.monotonic() + self.timeout_s
        return keys


@dataclass
class _Result:
    """An episode in the form that `judged` reads. Its branches exclude the prompt of the group."""

    group: int
    sample: int
    failed: bool
    turns: Sequence[str]
    whole: Completion
    counts: Mapping[str, float] = field(default_factory=dict)
    described: list[dict[str, Any]] = field(default_factory=list)  # empty: programs do not mark turns

    def completion(self, policy_version: int | None, *, several_turns: bool) -> Completion:
        branches = tuple(replace(branch, policy_version=policy_version) for branch in self.whole.branches)
        counts = {"turn/count": float(len(self.turns)), **self.counts} if several_turns else {}
        return replace(self.whole, counts=counts, policy_version=policy_version, branches=branches)


@dataclass(frozen=True)
class PlayCollector(Collector):
    """Collects judged groups of a task that plays its own episodes.

    `max_completion_length` limits the tokens of an episode's longest context after its first prompt. `max_turns` limits
    the calls of each agent.
    """

    def _groups(self, problems: Sequence[Problem], noise: dict[str, int]) -> list[Group]:
        judge, version = self.judge, self.engine.version
        played, calls = self._play(problems, noise)
        for key in sorted(played):
            if (failure := played[key].failure) is not None:
                kind = "timeout" if key in calls.late else "raised"
                judge.record(f"{self.task.name}.play", problems[key[0]], key[1], CallFailed(kind, failure))
        prompts, results = list[tuple[int, ...]](), list[_Result]()
        for group, problem in enumerate(problems):
            members = {key: episode for key, episode in sorted(played.items()) if key[0] == group}
            prompts.append(_common_prompt(problem, members.values()) or (self._untrained,))
            results += [self._result(key, episode, prompts[-1], calls) for key, episode in members.items()]
        return judged(self.task, problems, prompts, results, played, judge, version)  # type: ignore[arg-type]

    @property
    def _untrained(self) -> int:
        """The token that stands for an unknown prompt, and for the completion of an episode without a model call."""
        return int(self.renderer.tokenizer.eos_token_id)

    def _play(
        self, problems: Sequence[Problem], noise: dict[str, int]
    ) -> tuple[dict[Key, PlayedEpisode], EpisodeCalls]:
        """Play all episodes on the event loop, and sample their calls in this thread."""
        keys = [(group, sample) for group in range(len(problems)) for sample in range(self.sampling.num_generations)]
        episodes = min(len(keys), AT_ONCE)
        at_once, share = self._places(episodes)
        calls = EpisodeCalls(keys, self.judge.options.timeout_s, at_once, share)
        rows = min(self.sampling.max_batch or episodes, -(-episodes // share))
        sampling = replace(self.sampling, num_generations=1, max_batch=rows or None)
        converse = self.engine.converse if self.join_turns else partial(turn_by_turn, self.engine)
        playing = LOOP.submit(self._episodes(problems, calls, sampling, noise))
        playing.future.add_done_callback(lambda _: calls.close())
        try:
            drive(self.engine, calls, converse, **noise)
            if calls.error is not None:
                raise calls.error
        except BaseException:
            calls.close()
            playing.future.cancel()
            LOOP.wait([playing], self.judge.options.timeout_s, HungCalls())
            raise
        played: dict[Key, PlayedEpisode] = playing.result(None)
        return played, calls

    async def _episodes(
        self, problems: Sequence[Problem], calls: EpisodeCalls, sampling: SamplingParams, noise: dict[str, int]
    ) -> dict[Key, PlayedEpisode]:
        answer = _Answers(self, problems, calls, sampling).answer
        played: dict[Key, PlayedEpisode] = {}
        drawing = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        stops = {"stop": list(sampling.stop)}
        secret = secrets.token_urlsafe(24)
        async with Endpoint(answer, secret, context=self.engine.context).serving() as url:
            renderer = deepcopy(self.renderer) if self.overlap_tools else self.renderer  # a copy for concurrent use
            access = ModelAccess(url, secret, renderer, {**drawing, **stops}, noise, max_turns=self.max_turns)
            async with self.task.playing(access) as play:

                async def player() -> None:
                    key: Key | None = None
                    while (key := calls.begin_next(key)) is not None:
                        calls.playing[key] = asyncio.ensure_future(play(problems[key[0]], key[1]))
                        try:
                            played[key] = await calls.playing[key]
                        except asyncio.CancelledError:
                            if key not in calls.late:
                                raise
                            played[key] = PlayedEpisode(
                                failure=f"did not call the model for {calls.timeout_s:g} s (reward.timeout_s)"
                            )

                try:
                    async with asyncio.TaskGroup() as players:
                        for _ in range(min(AT_ONCE, len(calls.to_start))):
                            players.create_task(player())
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        return played

    def _result(self, key: Key, episode: PlayedEpisode, prompt: tuple[int, ...], calls: EpisodeCalls) -> _Result:
        """The completion of an episode: its last branch, with the other branches attached."""
        trained: set[int] = set()
        branches = [
            branch
            for tokens, sampled in reversed(episode.branches)
            if (branch := self._branch(key, tuple(tokens), sampled, prompt, calls, trained)) is not None
        ]
        last_call = calls.drawn[key][-1][1].stop_reason if calls.drawn[key] else ""
        stop = "length" if key in calls.full else episode.stop or last_call
        if not branches:  # an episode that ended before its first turn gets one token that is not trained
            branches = [Completion((self._untrained,), (False,), (0.0,), (0.0,), "", stop)]
        last, *others = (replace(branch, stop_reason=stop) for branch in branches)
        whole = replace(last, text=episode.text, branches=tuple(others))
        return _Result(*key, episode.failure is not None, episode.turns, whole)

    def _branch(
        self,
        key: Key,
        tokens: tuple[int, ...],
        sampled: Sequence[bool],
        prompt: tuple[int, ...],
        calls: EpisodeCalls,
        trained: set[int],
    ) -> Completion | None:
        """The tokens after the prompt. Tokens are trained if the engine drew them and no earlier branch trains them."""
        start, known = len(prompt), [False] * len(tokens)
        action, logp, filtered = [False] * len(tokens), [0.0] * len(tokens), [0.0] * len(tokens)
        answers = calls.drawn[key]
        for number in sorted(range(len(answers)), key=trained.__contains__):  # match untrained answers first
            context, drawn = answers[number]
            begin, end = len(context), len(context) + len(drawn.tokens)
            if tokens[:begin] != context or tokens[begin:end] != drawn.tokens or known[begin]:
                continue
            known[begin:end] = [True] * (end - begin)
            if number not in trained:
                trained.add(number)
                action[begin:end] = known[begin:end]
                only_filtered = self.engine.logp_after_filters and self.sampling.filtered
                logp[begin:end] = [float("nan")] * (end - begin) if only_filtered else drawn.sample_logp
                filtered[begin:end] = drawn.sample_logp if only_filtered else drawn.filtered_logp
        if list(sampled) != known:
            raise KeelError(
                f"{self.task.name}: completion {key[1]} of a problem has other sampled tokens than the engine drew: "
                "its program must not change the tokens that the endpoint returns"
            )
        if not any(action):
            return None
        cut = slice(start, None)
        return Completion(tokens[cut], tuple(action[cut]), tuple(logp[cut]), tuple(filtered[cut]), "", "")


@dataclass
class _Answers:
    """Answers requests to the endpoint by calls to the run's engine."""

    collector: PlayCollector
    problems: Sequence[Problem]
    calls: EpisodeCalls
    sampling: SamplingParams
    first: dict[Key, int] = field(default_factory=dict)  # number of tokens of each episode's first prompt
    positions: defaultdict[Key, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.group_of = {problem.key: number for number, problem in enumerate(self.problems)}

    async def answer(self, body: GenerateBody) -> Completion:
        """The completion of an episode's request. Its noise continues after the episode's earlier requests."""
        sampling, given = self.sampling, body.sampling_params
        noise = given.noise
        if given.keel is None or noise.problem not in self.group_of:
            raise KeelError("request.sampling_params.keel names no episode of this rollout")
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if getattr(given, name) != getattr(sampling, name):
                raise KeelError(
                    f"request.sampling_params.{name} is {getattr(given, name)}, and the run samples with rollout.{name}"
                    f"={getattr(sampling, name)}: leave it out"
                )
        key = self.group_of[noise.problem], noise.sample
        limit = self._limit(key, noise.problem, body)
        request = request_of(body, noise, start=self.positions[key], limit=limit)
        self.collector.engine.check(request, sampling)
        self.positions[key] += limit
        call = Call(request, sampling, key)
        self.calls.submit(call)
        return await asyncio.wrap_future(call.done)

    def _limit(self, key: Key, problem: str, body: GenerateBody) -> int:
        """The largest number of tokens of the answer."""
        collector, tokens = self.collector, body.token_ids
        if key not in self.first:
            try:
                fit(tokens, collector.max_prompt_length, "error", problem)
                check_context(collector.engine, [self.problems[key[0]]], [tokens], self.sampling)
            except KeelError as error:  # an error in the configuration ends the rollout, as for other tasks
                self.calls.abort(error)
                raise
            self.first[key] = len(tokens)
        longest = self.first[key] + self.sampling.max_completion_length
        if longest <= len(tokens):
            self.calls.full.add(key)
            raise context_exceeded(len(tokens), longest)
        limits = longest - len(tokens), collector.max_turn_length, body.sampling_params.max_tokens
        return min(limit for limit in limits if limit is not None)


def _common_prompt(problem: Problem, episodes: Iterable[PlayedEpisode]) -> tuple[int, ...]:
    """The longest common prefix of a group's contexts, before their first sampled token; () if none was sampled."""
    branches = [branch for episode in episodes for branch in episode.branches if any(branch[1])]
    heads = [tokens[: list(sampled).index(True)] for tokens, sampled in branches]
    prompt = tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*heads, strict=False)))
    if heads and not prompt:
        raise KeelError(
            f"problem {problem.key!r}: the contexts of its episodes begin with different tokens, so they cannot form "
            "a group"
        )
    return prompt
