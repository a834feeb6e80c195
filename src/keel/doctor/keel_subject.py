"""A configuration as a subject: the real parts that it configures, and one small batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward, RewardFailure, Scores
from keel.config import Config
from keel.doctor.findings import Options
from keel.doctor.recording import RecordingEngine
from keel.doctor.subject import Budget, Power, Subject
from keel.doctor.thresholds import Thresholds, load_thresholds
from keel.envs import Task
from keel.envs.judge import Judge
from keel.envs.rewards import RewardPart
from keel.models.options import LoadedModel
from keel.rollout import Engine
from keel.rollout.render import Renderer
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams
from keel.run.build import Built, build_policy, build_renderer, build_run, build_warmstart
from keel.run.warmstart import cached_sft, is_complete, warmstart_folder
from keel.trainer.batch import StepBatch, detached, pack_step, score_micro, score_reference, stitch
from keel.trainer.integrity import check_model
from keel.trainer.state import TrainingRun

WARMSTART_S = 60.0
_VERSIONS = count(1)  # versions of the syncs after the first
_NO_REWARD = RewardPart("none", lambda problem, turns: Reward(0.0), trusted=True)


@dataclass(frozen=True)
class KeelSubject(Subject):
    """Policy, task, engine and reference as training would build them, and one judged batch.

    `failures` are reward calls that failed. `notes` are lines for the diagnosis, for example about the warm start.
    `turns` are the engine's requests for the batch and its answers.
    """

    powers: ClassVar[frozenset[Power]] = frozenset(get_args(Power))

    config: Config
    built: Built
    batch: StepBatch
    failures: tuple[RewardFailure, ...] = ()
    notes: tuple[str, ...] = ()
    warmstart_cut: str | None = None  # the completed part of a warm start that was stopped early
    turns: tuple[Turn, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)  # measurements that later probes reuse
    of_batch: dict[str, Any] = field(default_factory=dict)  # the same, valid for this batch only
    thresholds: Thresholds = field(default_factory=load_thresholds)
    budget: Budget = field(default_factory=Budget)
    found: set[str] = field(default_factory=set)
    cut_from: KeelSubject | None = None  # the setup with the full sample, if the batch was cut

    def lacks(self, power: Power) -> str:
        if power == "reference" and self.run.reference is None:
            return "this run has no reference"
        if power == "golds" and self.run.task.prompts_only:
            return "the task has no gold answers"
        if power == "rewards" and (self.failures or self.built.judge.remote):
            return "a reward failed" if self.failures else "the judge is remote, so its calls are limited"
        return super().lacks(power)

    def spelled(self, options: Options) -> Options:
        return options

    @property
    def run(self) -> TrainingRun:
        return self.built.run

    @property
    def policy(self) -> LoadedModel:
        return self.built.run.policy

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.batch.groups

    @property
    def whole(self) -> KeelSubject:
        """The setup with the full sample, on which statistics of rewards and lengths are computed."""
        return self if self.cut_from is None else self.cut_from

    @property
    def sampled(self) -> tuple[Group, ...]:
        """The groups as sampled, before any cut."""
        return self.whole.groups

    @property
    def completion_length(self) -> float:
        """The mean number of trained tokens per completion, as sampled."""
        return float(self.whole.mask.sum()) / len(self.whole.mask)

    @property
    def loss_length(self) -> int:
        """`max_completion_length` for the loss, times the mean length of cut completions over that of full ones.

        A loss that divides by this constant then gives cut completions the weight of full ones.
        """
        limit = self.run.rollout.max_completion_length
        if self.cut_from is None:
            return limit
        return max(1, round(limit * float(self.mask.sum()) / len(self.mask) / self.completion_length))

    @property
    def mask(self) -> Tensor:
        """`[B, T]`: the trained tokens."""
        return self.batch.rows.action_mask

    @property
    def temperature(self) -> float:
        """The temperature of sampling and scoring."""
        return self.run.rollout.temperature

    @property
    def beta(self) -> float:
        """The KL coefficient of the first step from the run's controller; 0 during its warm-up."""
        return self._coefficient("beta")

    @property
    def full_beta(self) -> float:
        """The KL coefficient of the first step without the warm-up."""
        return self._coefficient("base")

    def _coefficient(self, name: str) -> float:
        """A coefficient from the controller, or the configured β if it is not a number of at least 0."""
        try:
            value = float(getattr(self.run.controller.init(), name))
        except Exception:  # a user's controller may raise anything
            value = math.nan
        return value if math.isfinite(value) and value >= 0 else self.config.kl.beta

    @property
    def multi_turn(self) -> bool:
        return any(not all(c.action) for group in self.groups for c in group.completions)

    def collect(
        self,
        problems: Sequence[Problem] | None = None,
        *,
        step: int = 0,
        sampling: SamplingParams | None = None,
        judged: bool = False,
    ) -> list[Group]:
        """Sample the batch's problems again, or sample other problems. Equal steps use equal noise.

        Rewards are computed only if `judged`; otherwise they are 0.
        """
        chosen = [group.problem for group in self.groups] if problems is None else problems
        judge = self.built.judge if judged else Judge([_NO_REWARD], self.built.judge.options)
        renderer = copy(self.built.collector.renderer)
        if "prompt" in vars(self):  # replaced by an alternative prompt
            vars(renderer)["prompt"] = self.prompt
        sampling = self.sampling if sampling is None else sampling
        own = replace(self.built.collector, engine=self.engine, renderer=renderer, sampling=sampling, judge=judge)
        return own.collect(chosen, step=step)

    def score(self, groups: Sequence[Group] | None = None) -> Tensor:
        return self.logp(None if groups is None else self.pack(groups))

    def sample(self, *, step: int = 0) -> list[Group]:
        return self.collect(step=step)

    def complete(self, prompts: Sequence[tuple[int, ...]], *, samples: int, length: int, step: int) -> list[Group]:
        sampling = replace(self.sampling, num_generations=samples, stop=())
        requests = [Request(f"text {i}", prompt, max_new=length) for i, prompt in enumerate(prompts)]
        answers: list[list[Completion]] = []
        with suppress(KeelError):  # an engine may refuse prompts of a few random tokens
            answers = self.engine.generate(requests, sampling, seed=self.config.run.seed, attempt=0, step=step)
            self.engine.release()
        decode = self.policy.tokenizer.decode
        return [
            Group(Problem(request.key, str(decode(list(request.tokens)))), request.tokens, tuple(group))
            for request, group in zip(requests, answers, strict=False)
        ]

    def judged(self, problems: Sequence[Problem], *, generations: int, step: int = 0) -> list[Group]:
        limit = self.config.rollout.max_completion_length
        drawn = replace(self.built.sampling, max_completion_length=limit, num_generations=generations)
        groups = self.collect(problems, step=step, sampling=drawn, judged=True)
        self.built.judge.drain()
        return groups

    def sync(self) -> None:
        self.run.engine.sync(self.policy.model, next(_VERSIONS))

    @property
    def written(self) -> Tensor:
        """`[B, T]`: all tokens of the batch's completions, trained or not."""
        counts = torch.tensor([len(c.tokens) for c in self.batch.completions], device=self.mask.device)
        return torch.arange(self.batch.width, device=self.mask.device) < counts[:, None]

    @property
    def in_half_precision(self) -> bool:
        types = {parameter.dtype for parameter in self.policy.model.parameters()}
        return self.run.amp_dtype is not None or types != {torch.float32}

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        narrow, self.run.amp_dtype = self.run.amp_dtype, None
        try:
            yield
        finally:
            self.run.amp_dtype = narrow

    @cached_property
    def engine(self) -> Engine:
        return self.run.engine

    @cached_property
    def renderer(self) -> Renderer:
        """The run's renderer, which renders training prompts."""
        return build_renderer(self.config, self.policy.tokenizer)

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        key = "prompt", str(problem.prompt), str(problem.tools)
        if key not in self._rendered:
            self._rendered[key] = self.renderer.prompt(problem)
        return self._rendered[key]

    def answer(self, problem: Problem) -> tuple[int, ...]:
        key = "answer", problem.key, str(problem.prompt)
        if key not in self._rendered:
            self._rendered[key] = self._answer(problem)
        return self._rendered[key]

    def _answer(self, problem: Problem) -> tuple[int, ...]:
        try:
            turns = self.run.task.gold_turns(problem)
        except (KeelError, NotImplementedError):  # a part of a mixture, or a task without gold answers
            turns = []
        return tuple(self.policy.tokenizer.encode(turns[-1], add_special_tokens=False)) if turns else ()

    @cached_property
    def _rendered(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return {}

    def problems(self, count: int, *, step: int = 0) -> list[Problem]:
        if (count, step) not in self._drawn:
            self._drawn[count, step] = list(self.run.task.sample(count, seed=self.config.run.seed, step=step))
        return self._drawn[count, step]

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], list[Problem]]:
        return {}

    @property
    def judgements_left(self) -> int:
        """The number of further completions that the rewards may judge."""
        return max(0, self.budget.judgements - max(self.built.judge.asked.values(), default=0))

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling options, with the batch's number of completions per problem."""
        return replace(self.built.sampling, num_generations=len(self.groups[0].completions))

    def pack(self, groups: Sequence[Group]) -> StepBatch:
        return pack_step(groups, self.run, stale=self.run.rollout.max_staleness > 0)

    def scores(self, batch: StepBatch | None = None) -> Scores:
        """One detached forward of the policy through training's own functions; each result is `[B, T]`."""
        batch = self.batch if batch is None else batch
        parts = [detached(score_micro(micro, batch, self.run)) for micro in batch.micros]
        entropy = [part.entropy for part in parts if part.entropy is not None]
        exact = [part.exact_kl for part in parts if part.exact_kl is not None]
        return Scores(
            stitch((part.logp for part in parts), batch.width),
            stitch(entropy, batch.width) if entropy else None,
            stitch(exact, batch.width) if exact else None,
        )

    def logp(self, batch: StepBatch | None = None) -> Tensor:
        """Training's log-probabilities `[B, T]`, 0 outside the completions."""
        return self.scores(batch).logp

    def ref_logp(self, batch: StepBatch | None = None) -> Tensor | None:
        """The reference's log-probabilities `[B, T]`; None without a reference."""
        if self.run.reference is None:
            return None
        return score_reference(self.batch if batch is None else batch, self.run).rows.ref_logp


def build_subject(
    config: Config,
    *,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
    problems: int = 4,
    generations: int = 4,
    warmstart_s: float = WARMSTART_S,
) -> KeelSubject:
    """Build the parts, then sample and judge `problems` × `generations` completions with the real engine and judge.

    A failing reward counts as 0 here, whatever `reward.on_error` says, so that the other checks can run. Close
    `KeelSubject.run` after use.
    """
    lenient = config.model_copy(update={"reward": config.reward.model_copy(update={"on_error": "zero"})})
    loaded, notes, cut = _policy(lenient, task, warmstart_s)
    most = min(generations, config.rollout.num_generations) if config.rollout.num_generations > 1 else generations
    built = build_run(lenient, loaded, task=task, reward=reward)
    with ExitStack() as on_error:
        on_error.callback(built.run.close)
        built.run.engine.sync(loaded.model, 0)
        sampling = replace(built.sampling, num_generations=max(most, 2))
        drawn = built.run.task.sample(problems, seed=config.run.seed, step=0)
        recorder = RecordingEngine(built.run.engine)
        groups = replace(built.collector, engine=recorder, sampling=sampling).collect(drawn)
        # mismatch weights need finite log-probabilities; a later probe reports non-finite weights
        finite = all(bool(p.isfinite().all()) for p in loaded.model.parameters() if p.is_floating_point())
        batch = pack_step(groups, built.run, stale=config.rollout.max_staleness > 0 and finite)
        on_error.pop_all()
    failures = tuple(built.judge.drain())
    return KeelSubject(config, built, batch, failures, (*notes, *built.notes), cut, tuple(recorder.turns))


class _OutOfTime(Exception):
    """Stops a warm start that exceeds its time limit."""


def _policy(config: Config, task: Task | None, limit_s: float) -> tuple[LoadedModel, tuple[str, ...], str | None]:
    """The policy at step 0, after the run's saved warm start or else after a new one with a time limit.

    Returns (policy, notes, the completed part of a stopped warm start or None).
    """
    if config.warmstart is None:
        return (*_load(config), None)
    saved = warmstart_folder(Path(config.run.dir) / config.run.name, config)
    if is_complete(saved):
        loaded, notes = _load(config, saved)
        return loaded, (*notes, f"the warm start of this configuration was found in {saved} and used"), None
    loaded, notes = _load(config)
    began, done = time.monotonic(), 0
    start = build_warmstart(config, loaded, task)

    def report(step: int, line: Mapping[str, float]) -> None:
        nonlocal done
        done = step
        spent = time.monotonic() - began
        # estimated total time; up to twice the limit the warm start is completed, because its result is cached
        whole = spent / step * start.options.steps
        if spent > limit_s and whole > 2 * limit_s and step < start.options.steps:
            raise _OutOfTime

    try:
        started = cached_sft(loaded, start, report)
    except _OutOfTime:
        cut = f"{done} of {start.options.steps} steps of its warm start ({time.monotonic() - began:.0f} s)"
        return (
            loaded,
            (*notes, (f"the policy had only {cut}; train once, and the doctor will use the complete warm start")),
            cut,
        )
    if started.cache_file is not None:
        return loaded, (*notes, f"the warm start was loaded from the cache: {started.cache_file}"), None
    return loaded, (*notes, f"the warm start ran its {done} steps in {time.monotonic() - began:.0f} s"), None


def _load(config: Config, weights: Path | None = None) -> tuple[LoadedModel, tuple[str, ...]]:
    """Load the policy. If training would refuse it because its scores do not repeat, add a note instead."""
    if weights is not None:
        check_model(weights)
    try:
        return build_policy(config, weights), ()
    except KeelError as refusal:
        loaded = build_policy(config, weights, probe=False)  # raises again if the probe was not the reason
        return loaded, (f"training would refuse this model: {refusal}",)


__all__ = ["KeelSubject", "build_subject"]
