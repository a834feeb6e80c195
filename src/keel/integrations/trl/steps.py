"""Keel's hooks in a training step: before the optimizer's step, after it, and at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from keel.doctor.names import TRAINERS
from keel.integrations.trl.rundir import good_checkpoints
from keel.integrations.trl.window import Update, Window, gather, measure, rollout_records, skipped_record
from keel.kl.measure import REFERENCE, controlled_kl
from keel.trainer.guards import (
    GuardViolation,
    find_violation,
    first_nonfinite,
    next_guard_state,
    no_signal_events,
    over_budget,
    spike_limit,
    step0_limits,
    step0_violations,
)
from keel.trainer.measure import peak_gib
from keel.trainer.options import GuardLimits
from keel.trainer.state import Skipped, State

logger = logging.getLogger("keel")


class Steps(TrainerCallback):
    """Guards an update, then updates β and records the step. `trainer` is the KeelGRPOTrainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.limits = GuardLimits.of(trainer.keel.guards, {})
        self.grad_norm = math.nan
        self.update: Update | None = None
        self.seen: dict[str, int] = {}  # per metric: how many values since TRL's last log were already read
        self.names: set[str] = set()  # names of Keel's metrics in TRL's log

    def begin(self) -> None:
        """Discard the state of an interrupted run."""
        self.update, self.seen = None, {}

    # -------------------------------------------------------------------------------------- guarded update

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Check the update's numbers, and drop the gradients if the update must be skipped."""
        trainer = self.trainer
        window = gather(trainer._passes, trainer._world)
        own = None if window is None else self._judged(window)
        line, applied, tokens = trainer._world.broadcast(own)
        if not applied:
            for parameter in trainer.model.parameters():
                parameter.grad = None  # an optimizer skips parameters without a gradient, including their moments
        self.update = Update(window, line, applied, tokens)
        # If this flag is True (fp16's scaler also sets it), transformers does not advance the learning-rate schedule.
        trainer.optimizer._is_overflow = False

    def _judged(self, window: Window) -> tuple[dict[str, float], bool, int]:
        """The metrics of an update, whether it is applied, and its tokens."""
        trainer, norm = self.trainer, self.grad_norm
        limit = spike_limit(trainer.keel_state.norms, self.limits)
        finite = math.isfinite(norm) and math.isfinite(window.loss)
        spike = finite and limit is not None and norm > limit
        applied = finite and not (spike and trainer.keel.guards.on_spike == "skip")
        most = trainer.args.max_grad_norm
        clip = min(1.0, most / norm) if applied and most and norm > 0 else float(applied)
        line = measure(window, trainer.keel.kl.log_ratio_clamp)
        line |= {
            "grad/norm": norm,
            "grad/clip_factor": clip,
            "optim/learning_rate": trainer._get_learning_rate(),
            "guard/skipped": float(not applied),
            "guard/nonfinite": float(not finite),
            "guard/spike": float(spike),
            "guard/rollbacks": 0.0,
            "kl/beta": trainer.keel_state.beta,
        }
        return line, applied, window.tokens

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        assert self.update is not None
        if not self.update.applied:
            self.trainer.optimizer._is_overflow = True

    # --------------------------------------------------------------------------------------- end of a step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Update β, move the reference, log, and stop if a guard asks for it."""
        trainer, update = self.trainer, self.update
        assert update is not None
        settings, before = trainer.keel, trainer.keel_state
        line = trainer._world.broadcast({**self._own_metrics(update.tokens), **update.line})
        line["guard/over_budget"] = float(over_budget(line, settings.kl.budget) is not None)
        trainer.keel_state = self._next_state(before, line, update)
        trainer._move_reference(line.get("kl/policy_ref/k3/mean"))
        self._record(line, before, update)
        violation = self._at_start(line)
        trainer._trained = True
        violation = violation or find_violation(trainer.keel_state, line, settings.guards, settings.kl.budget)
        if violation is not None and violation.code == "kl/over-budget" and not before.over_budget:
            self._event(violation.code, violation.message)
        if violation is not None and violation.action != "warn":
            self._stop(violation, control)
        trainer._passes, self.update = [], None

    def _at_start(self, line: Mapping[str, float]) -> GuardViolation | None:
        """The step-0 check of Keel's own trainer, at the first update after the reference was created."""
        trainer, args = self.trainer, self.trainer.args
        if trainer._trained:
            return None
        limits = step0_limits(
            trainer.model,
            trainer.keel_reference,
            self.limits,
            amp_dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            same_modules=False,
            weighed=trainer._mismatch.kind != "none",
        )
        advice = "next: keel doctor --trl module:build_trainer; or continue with guards={'on_step0_kl': 'warn'}"
        found = step0_violations(line, limits, trainer.keel.guards.on_step0_kl, advice)
        for violation in found:
            self._event(violation.code, violation.message)
        return next((violation for violation in found if violation.action == "stop"), None)

    def _own_metrics(self, tokens: int) -> dict[str, float]:
        """TRL's metrics of this update under Keel's names. Each is the mean of the values since the last update."""
        metrics: dict[str, float] = {}
        for name, values in self.trainer._metrics["train"].items():
            fresh = [value for value in values[self.seen.get(name, 0) :] if not math.isnan(value)]
            known = TRAINERS["TRL"].find(name)
            if name == "step_time" and fresh:
                metrics["time/total_s"] = sum(fresh)
                metrics["speed/tokens_per_s"] = tokens / max(sum(fresh), 1e-9)
            elif fresh and known is not None and not known[1].keel.startswith("other/"):
                metrics[known[1].keel] = known[1].factor * sum(fresh) / len(fresh)
            self.seen[name] = len(values)
        return {**metrics, "memory/peak_gib": peak_gib(self.trainer.accelerator.device)}

    def _next_state(self, before: State, line: dict[str, float], update: Update) -> State:
        """The next state: β from the controller, and the guards' state."""
        trainer = self.trainer
        last_kl = {name: value for name, value in line.items() if name.startswith("kl/policy_ref/")}
        steered = trainer.keel_controller.update(before.kl, controlled_kl(line, trainer.keel_controller.unit))
        state = before.next(kl={REFERENCE: steered}, skipped=Skipped.of(line), tokens=update.tokens, last_kl=last_kl)
        judged = next_guard_state(
            replace(state, step=trainer.state.global_step),
            line,
            trainer.keel.kl.budget,
            applied_norms=[line["grad/norm"]] if update.applied else [],
            constant=line.get("reward/std") == 0.0,
            silent=line.get("reward/zero_variance_fraction") == 1.0,
        )
        if "reward/std" in line:
            return judged
        # The rewards of this update were already counted in an earlier one.
        return replace(judged, constant_rewards=before.constant_rewards, zero_advantages=before.zero_advantages)

    def _stop(self, violation: GuardViolation, control: Any) -> None:
        """End training at the last good checkpoint; the current state is not saved."""
        trainer = self.trainer
        control.should_training_stop, control.should_save = True, False
        newest = next(good_checkpoints(Path(trainer.args.output_dir), trainer.keel_state.confirmed), None)
        good = trainer._good = trainer._world.broadcast(None if newest is None else str(newest))
        if good is None:
            often = "lower" if trainer.args.save_strategy == "steps" else "set save_strategy='steps' and"
            outcome = f"the run stops and has no good checkpoint to go back to: {often} save_steps"
        else:
            trainer.state.best_model_checkpoint = good  # transformers keeps this checkpoint and loads it at the end
            outcome = (
                f"the run stops at its last good checkpoint, {Path(good).name}; continue from there with: "
                f"trainer.train(resume_from_checkpoint={good!r})"
            )
        trainer.keel_stopped = f"{violation.message}: {outcome}"
        self._event("stop", trainer.keel_stopped, code=violation.code)
        if trainer._world.is_main:
            print(trainer.keel_stopped, flush=True)

    # ------------------------------------------------------------------------------------------- recording

    def _record(self, line: Mapping[str, float], before: State, update: Update) -> None:
        """Log Keel's metrics in TRL and a complete line in the run directory; save the batch of a skipped update."""
        trainer, step = self.trainer, self.trainer.state.global_step
        for name in (*update.line, "guard/over_budget"):  # TRL itself logs the other metrics, under its own names
            trainer._metrics["train"][name].append(line[name])
            self.seen[name] = len(trainer._metrics["train"][name])
            self.names.add(name)
        passes, skipped = trainer._passes, not update.applied
        batches = trainer._world.all_gather(skipped_record(passes, trainer._tokenizer)) if skipped else []
        if update.window is None:
            return
        trainer.keel_run.step(step, line)
        trainer.keel_run.state = trainer.keel_state
        shown = [part for part in passes if not part.again and trainer.keel_run.shows(part.generated.number)]
        trainer.keel_run.rollouts(step, rollout_records(shown, trainer._tokenizer, trainer.eos_token_ids))
        if line["guard/spike"]:
            limit = spike_limit(before.norms, self.limits) or math.nan
            median = limit / self.limits.grad_spike
            message = f"the gradient norm {line['grad/norm']:.4g} is {line['grad/norm'] / median:.3g} × the running "
            self._event("guard/spike", message + f"median {median:.4g}")
        if skipped:
            rows = replace(update.window.batch, old_logp=update.window.scores.logp)
            first = first_nonfinite(rows, line, None) if line["guard/nonfinite"] else None
            cause = f"the {first or 'gradient norm'} is not finite" if line["guard/nonfinite"] else "a gradient spike"
            completions = [completion for batch in batches for completion in batch]
            trainer.keel_run.skipped(
                step, {"step": step, "first_nonfinite": first, "metrics": dict(line), "completions": completions}, cause
            )
        for kind, message in no_signal_events(trainer.keel_state, trainer.keel.guards) if "reward/std" in line else ():
            self._event(kind, message)

    def pool(self) -> None:
        """Reduce each of Keel's metrics since TRL's last log to one number, so that TRL's mean does not change it."""
        metrics = self.trainer._metrics["train"]
        for name in self.names & metrics.keys():
            metrics[name] = [over_steps(name, metrics[name])]

    def _event(self, kind: str, message: str, **more: Any) -> None:
        trainer = self.trainer
        if trainer._world.is_main:
            trainer.keel_run.event(kind, step=trainer.state.global_step, message=message, **more)
            logger.warning("%s: %s", kind, message)


def over_steps(name: str, values: Sequence[float]) -> float:
    """Reduce a metric over several steps, by its name: to the standard error of the mean, the maximum, the minimum or
    the mean.
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith("/se"):
        return math.hypot(*known) / len(known)
    if name.endswith(("/max", "_max")):
        return max(known)
    return min(known) if name.endswith("/min") else sum(known) / len(known)
