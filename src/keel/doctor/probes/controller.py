"""The controller of β: a valid coefficient at every step, a reachable target, and a suitable course over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from keel.base.errors import first_line
from keel.doctor.advice import no_penalty
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.kl.controllers import UNITS, RuleController, controller_from_options

LEVELS = (1e-4, 0.05, 10.0)  # measured KL to test with: almost none, a usual one, a KL explosion
UPDATES = 200
FEW_UPDATES = 20  # least duration of a schedule, in updates: a tenth of UPDATES
SCHEDULES = ("warmup", "linear", "cosine")  # Keel's schedules, which end at a configured step
PER_TOKEN = 0.05  # nats: the usual target of a controller
WAVE, HALF_WAVE = 1.25, 5  # a simulated KL above and below its target by this factor, alternating after this many steps
MANY_FOLD, FELT = 100.0, 0.1  # growth of β from noise in the KL alone, and the largest β in recipes
TIMES_MORE = 10.0  # factor over the configured β, whatever the KL
FAR_OVER = 10.0  # factor over the target during the whole run
IDLE = 0.005  # relative change of β over a run below which a controller has no effect
MOST_STEPS = 2_000


def controller_findings(setup: KeelSubject, figures: dict[str, float]) -> list[Finding]:
    """Report invalid coefficients first, then unreachable targets, then β over the run's steps."""
    return [*steered(setup, figures)] or [*_targets(setup)] or [*over_the_run(setup, figures)]


def steered(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """β at the start and after every update, for a small, usual and very large KL, and for steps without one."""
    name, configured = setup.config.kl.controller.name, setup.config.kl.beta
    figures |= {"beta_start": math.nan, "beta_most": math.nan}
    fix = "return a state whose beta is finite, 0 or more, and bounded (keel.kl.controllers.RuleController has bounds)"
    try:
        controller = setup.run.controller
        unit, start = controller.unit, float(controller.init().beta)
        series = {level: _betas(setup, level) for level in LEVELS}
    except Exception as error:  # a user's controller may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        yield finding("kl/controller", f"kl.controller={name} raises {why}", "the controller is broken", fix)
        return
    every = [start, *(beta for betas in series.values() for beta in betas)]
    figures |= {"beta_start": start, "beta_most": max(every)}
    limit = max(setup.thresholds["controller_beta"], 10 * configured)
    acting = [max((i + 1 for i, beta in enumerate(betas) if beta > 0), default=0) for betas in series.values()]
    wrong = next(((level, i, b) for level, betas in series.items() for i, b in enumerate(betas) if not b >= 0), None)
    growing = max(limit, start)  # the balance probe checks a large initial β
    high = next(((level, i, b) for level, betas in series.items() for i, b in enumerate(betas) if b > growing), None)
    if unit not in UNITS:
        evidence = f"kl.controller={name} reads a KL in the unit {unit!r}, which is neither {' nor '.join(UNITS)}"
        yield finding("kl/controller", evidence, "the training loop does not know this unit", f"set unit={UNITS[0]!r}")
    elif not (math.isfinite(start) and start >= 0) or wrong is not None:
        where = f"β = {start:g} at the start" if wrong is None or not start >= 0 else _at(*wrong)
        cause = "a negative coefficient rewards distance from the reference, and a non-finite one breaks the loss"
        yield finding("kl/controller", f"kl.controller={name} gives {where}", cause, fix)
    elif high is not None:
        cause = f"the coefficient grows without bound, while kl.beta is {configured:g}"
        yield finding("kl/controller", f"kl.controller={name} gives {_at(*high)} (over {limit:g})", cause, fix)
    elif configured > 0 and min(every) > TIMES_MORE * configured and _follows(setup, start):
        yield finding(
            "kl/controller",
            f"kl.controller={name} gives β = {start:g} at the start and never less than {min(every):g}, even at a KL "
            f"of {min(LEVELS):g}, while kl.beta is {configured:g}",
            "the controller reads kl.beta in another unit, such as percent, or for a sum instead of a mean",
            propose("let the controller start from kl.beta, or set {}", {"kl.controller": {"name": "fixed"}}),
            severity="warning",
        )
    elif configured > 0 and max(every) == 0:
        yield finding(
            "kl/controller",
            f"kl.controller={name} gives β = 0 at the start and after {UPDATES} updates, whatever the KL is",
            f"kl.beta={configured:g} has no effect",
            propose("fix the controller, or set {} if no penalty is wanted", no_penalty(setup.config.to_dict())),
            severity="warning",
        )
    elif start > 0 and max(acting) < min(FEW_UPDATES, setup.config.run.max_steps // (20 if name in SCHEDULES else 2)):
        yield finding(
            "kl/controller",
            f"kl.controller={name} gives β = {start:g} at the start and 0 from update {max(acting) + 1} on, even at a "
            f"KL of {max(LEVELS):g} ({UPDATES} updates were simulated)",
            f"the KL penalty ends before it is needed, so kl.beta={configured:g} has almost no effect",
            propose("fix the controller, or set {} if no penalty is wanted", no_penalty(setup.config.to_dict())),
            severity="warning",
        )


def _follows(setup: KeelSubject, start: float) -> bool:
    """Whether doubling kl.beta doubles the initial β. A controller with its own lower bound does not do that."""
    twice = setup.config.kl.model_copy(update={"beta": 2 * setup.config.kl.beta})
    return math.isclose(
        float(controller_from_options(twice, setup.config.episodes_per_step).init().beta), 2 * start, rel_tol=0.01
    )


def _at(level: float, update: int, beta: float) -> str:
    return f"β = {beta:.3g} after {update + 1} updates at a KL of {level:g}"


def _targets(setup: KeelSubject) -> Iterator[Finding]:
    """A target that is too high never raises β; one that is too low raises it before anything is learned."""
    options, controller = setup.config.kl.controller, setup.run.controller
    target = (options.model_extra or {}).get("target")
    if not isinstance(target, int | float) or not setup.config.kl.adapts_beta:
        return
    length = setup.completion_length
    most, least = (
        max(setup.thresholds["kl_explosion_floor"] * length, setup.thresholds["kl_explosion"]),
        setup.thresholds["reach_least"],
    )
    tokens = 1.0 if controller.unit == "per_sequence" else length
    start = float(controller.init().base)
    lax = target * tokens > most and max(_betas(setup, most / tokens)) <= start
    tight = target * tokens < least and _betas(setup, least / tokens)[-1] > start
    if not lax and not tight:
        return
    unit = controller.unit.replace("_", " ")
    usual = float(f"{PER_TOKEN if unit == 'per token' else PER_TOKEN * length:.1g}")
    yield finding(
        "kl/controller",
        f"kl.controller.target={target:g} nats {unit}, {target * tokens:.3g} per completion of {length:.3g} tokens: β "
        + (
            f"never rises above {start:g}, even at {most / tokens:.3g} nats {unit}, which is far beyond any useful KL"
            if lax
            else (
                f"rises from {start:g} already at {least / tokens:.2g} nats {unit}, at which no change of the policy "
                "is measurable"
            )
        ),
        "the target is in another unit than the controller's, or mistyped: "
        + (
            "the KL never reaches the target, and β only falls"
            if lax
            else "the KL always exceeds the target, and β only rises"
        ),
        propose("set {}", {"kl.controller.target": usual}),
        severity="warning" if lax else None,  # a β that only rises dominates the update in the end
    )


def _betas(setup: KeelSubject, level: float) -> list[float]:
    controller, betas = setup.run.controller, []
    state = controller.init()
    for update in range(UPDATES):
        measured = (None, math.nan)[update // 10 % 2] if update % 10 == 9 else level
        state = controller.update(state, measured)
        betas.append(float(state.beta))
    return betas


def over_the_run(setup: KeelSubject, figures: dict[str, float]) -> Iterator[Finding]:
    """Find a β whose warm-up outlasts the run, that follows the noise of single steps, or that hardly changes."""
    kl, controller = setup.config.kl, setup.run.controller
    steps = min(setup.config.run.max_steps, MOST_STEPS)
    if steps < FEW_UPDATES:  # a trial run is too short to judge
        return
    target = (kl.controller.model_extra or {}).get("target")
    start, name = float(controller.init().base), f"kl.controller={kl.controller.name}"
    steers = kl.adapts_beta and isinstance(target, int | float)
    level = float(target) if steers and target is not None else PER_TOKEN
    betas = list(islice(_course(setup, [level]), steps))
    figures["beta_arrived"] = max(betas) / start if start > 0 else 1.0
    evidence = cause = ""
    change: dict[str, object] = {}
    if start > 0 and figures["beta_arrived"] < 0.5:
        evidence = f"{name} gives a β of at most {max(betas):.3g} in {steps} steps instead of {start:g}"
        cause = "the warm-up is longer than the run, so β never reaches its configured value"
        option = "kl.controller.steps" if kl.controller.name == "warmup" else "kl.controller.warmup_steps"
        change = {option: max(1, steps // 10)}
    elif steers:
        wave = list(islice(_course(setup, [level * WAVE] * HALF_WAVE + [level / WAVE] * HALF_WAVE), 4 * HALF_WAVE))
        far = list(islice(_course(setup, [level * FAR_OVER]), steps))
        low, high = min(wave[HALF_WAVE:]), max(wave)
        swing = high / low if low > 0 else math.inf if high > 0 else 1.0
        figures |= {"beta_swing": swing, "beta_steered": max(far) / start if start > 0 else math.inf}
        leap = max(FELT, MANY_FOLD * start) if start > 0 else math.inf
        if swing > setup.thresholds["controller_swing"] and high > min(leap, setup.thresholds["beta_strong"]):
            evidence = (
                f"{name} takes β from {low:.2g} to {high:.3g} and back while the KL varies by a quarter around its "
                f"target of {level:g} (a factor of more than {setup.thresholds['controller_swing']:g})"
            )
            cause = (
                "the controller reacts to noise: β is almost 0 at one step and dominates the update a few steps later"
            )
        elif abs(figures["beta_steered"] - 1) < IDLE and max(far) < controller_bound(setup):
            evidence = (
                f"{name} moves β from {start:g} to {max(far):g} in {steps} steps while the KL is {FAR_OVER:g} times "
                f"its target of {level:g}"
            )
            cause = "the controller is too slow for this run: β hardly changes, whatever the KL is"
        change = {"kl.controller": {"name": "pid", "target": level, "unit": controller.unit}}
    if evidence:
        yield finding("kl/controller", evidence, cause, propose("set {}", change), severity="warning")


def controller_bound(setup: KeelSubject) -> float:
    """The controller's upper bound of β, if it has one."""
    controller = setup.run.controller
    return float(controller.bounds[1]) if isinstance(controller, RuleController) else math.inf


def _course(setup: KeelSubject, levels: list[float]) -> Iterator[float]:
    """β at every step of a run whose measured KL repeats `levels`."""
    controller, every = setup.run.controller, max(1, setup.config.kl.measure_every)
    state, step = controller.init(), 0
    while True:
        yield float(state.beta)
        measured = levels[step % len(levels)] if setup.config.kl.penalizes or step % every == 0 else None
        state = controller.update(state, measured)
        step += 1
