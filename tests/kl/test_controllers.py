"""β over time: each rule by hand, bounds and finiteness under anything, exact resumption, and the closed loop."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.options import Options, PositiveFloat
from keel.kl import CONTROLLERS, BetaController, KLOptions, KLState, build_controller, controller_from_options

EVERY = {
    "fixed": {},
    "warmup": {"steps": 3},
    "linear": {"end": 0.5, "steps": 4},
    "cosine": {"end": 0.0, "steps": 4},
    "step": {"target": 0.05},
    "ziegler": {"episodes_per_step": 512},
    "dual": {"target": 0.05, "smoothing": 0.9},
    "pid": {"target": 0.05},
}


def betas(controller, measured):
    """β before the first update and after each."""
    state = controller.init()
    seen = [state.beta]
    for kl in measured:
        state = controller.update(state, kl)
        seen.append(state.beta)
    return seen


def test_every_controller_is_covered_here():
    assert set(EVERY) == set(CONTROLLERS)


def test_fixed():
    assert betas(build_controller("fixed", 0.04), [0.0, 9.0, None]) == [0.04] * 4


def test_warm_up_is_linear_from_zero():
    expected = [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    assert betas(build_controller("warmup", 0.1, steps=4), [None] * 5) == pytest.approx(expected)
    assert betas(build_controller("fixed", 0.1, warmup_steps=4), [1.0] * 5) == pytest.approx(expected)


def test_warm_up_on_top_of_a_rule():
    """While the factor rises the rule waits, so that it does not wind up against a β that is small on purpose."""
    controller = build_controller("step", 1.0, target=1.0, preset="ppo", warmup_steps=4)
    assert betas(controller, [9.0] * 5) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 2.0])


def test_linear_schedule():
    assert betas(build_controller("linear", 0.1, end=0.5, steps=4), [None] * 6) == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
    )


def test_cosine_schedule():
    half = math.sqrt(0.5)
    expected = [1.0, 0.5 + 0.5 * half, 0.5, 0.5 - 0.5 * half, 0.0, 0.0]
    assert betas(build_controller("cosine", 1.0, end=0.0, steps=4), [None] * 5) == pytest.approx(expected)


def test_schedules_ignore_the_measured_kl():
    assert betas(build_controller("linear", 0.1, end=0.5, steps=2), [99.0, math.nan]) == pytest.approx([0.1, 0.3, 0.5])


PRESETS = [
    # preset, target, KLs, β from 1.0
    ("ppo", 0.3, [0.46, 0.44, 0.21, 0.19, 0.0], [1.0, 2.0, 2.0, 2.0, 1.0, 0.5]),
    ("tutorial", 0.05, [0.076, 0.074, 0.026, 0.024], [1.0, 1.5, 1.5, 1.5, 1.125]),
    ("wide", 0.05, [0.101, 0.099, 0.026, 0.024], [1.0, 1.5, 1.5, 1.5, 1.2]),
]


@pytest.mark.parametrize(("preset", "target", "measured", "expected"), PRESETS)
def test_step_presets(preset, target, measured, expected):
    assert betas(build_controller("step", 1.0, target=target, preset=preset), measured) == pytest.approx(expected)


def test_gentle_preset_and_its_clamp():
    controller = build_controller("step", 0.5, target=0.05, preset="gentle")
    assert betas(controller, [0.076, 0.074, 0.024]) == pytest.approx([0.5, 0.55, 0.55, 0.495])
    assert betas(controller, [9.0] * 50)[-1] == 1.0
    assert betas(controller, [0.0] * 100)[-1] == 0.001


def test_step_rule_defaults_to_ppo_at_the_sources_target():
    assert betas(build_controller("step", 1.0), [0.076, 0.03]) == [1.0, 2.0, 1.0]


def test_step_rule_takes_bounds():
    controller = build_controller("step", 1.0, low=0.7, high=1.5)
    assert betas(controller, [9.0, 9.0, 0.0, 0.0, 0.0]) == [1.0, 1.5, 1.5, 0.75, 0.7, 0.7]


def test_ziegler_with_openais_figures():
    """0.15, 6 nats a sequence, horizon 10,000, 512 episodes a step: at most ±0.2·0.0512 = ±1.024 % a step."""
    controller = build_controller("ziegler", 0.15, episodes_per_step=512)
    expected = [0.15]
    for error in (0.2, -0.2, 0.1, 0.0):
        expected.append(expected[-1] * (1 + 0.0512 * error))
    assert betas(controller, [60.0, 0.0, 6.6, 6.0]) == pytest.approx(expected, rel=1e-12)
    assert expected[1] == pytest.approx(0.151536)
    assert controller.unit == "per_sequence"


def test_dual_ascent_on_log_beta_with_smoothing():
    controller = build_controller("dual", 0.1, target=0.05, learning_rate=0.2, smoothing=0.5)
    first = 0.1 * math.exp(0.2 * (0.1 / 0.05 - 1))
    second = first * math.exp(0.2 * ((0.5 * 0.1 + 0.5 * 0.02) / 0.05 - 1))
    assert betas(controller, [0.1, 0.02]) == pytest.approx([0.1, first, second], rel=1e-12)


def test_dual_ascent_as_in_the_textbook():
    controller = build_controller(
        "dual", 0.1, target=0.05, learning_rate=0.5, smoothing=0.0, log_space=False, low=0.0, high=1.0
    )
    assert betas(controller, [0.15, 0.05, 0.0, 0.0, 0.0, 0.0, 9.0]) == pytest.approx(
        [0.1, 0.15, 0.15, 0.125, 0.1, 0.075, 0.05, 1.0]
    )
    assert betas(controller, [0.0] * 5)[-1] == 0.0


def test_pid_by_hand():
    """e = 1, 2, 0.5, −1 at target 1; the derivative counts rises only, the integral stays at or above 0."""
    controller = build_controller("pid", 0.2, target=1.0, proportional=0.1, integral=0.01, derivative=0.05)
    expected = [
        0.2,
        0.2 + 0.1 * 1 + 0.01 * 1,
        0.2 + 0.1 * 2 + 0.01 * 3 + 0.05 * 1,
        0.2 + 0.1 * 0.5 + 0.01 * 3.5,
        0.2,  # −0.1 + 0.025 < 0
    ]
    assert betas(controller, [2.0, 3.0, 1.5, 0.0]) == pytest.approx(expected, rel=1e-12)


def test_pid_does_not_wind_up_at_its_bound():
    controller = build_controller("pid", 0.0, target=1.0, proportional=0.1, integral=0.1, derivative=0.0, high=1.0)
    state = controller.init()
    for _ in range(1000):
        state = controller.update(state, 2.0)
    assert state.beta == 1.0
    assert state.integral <= 20
    for _ in range(30):
        state = controller.update(state, 0.0)
    assert state.beta < 0.5


@pytest.mark.parametrize("spike", [1e6, 1e308])
def test_pid_recovers_from_one_wild_measurement(spike):
    """One absurd KL may pin β at its bound for a while, not for the rest of the run."""
    controller = build_controller("pid", 0.1, target=0.05)
    state = controller.update(controller.init(), spike)
    for _ in range(5000):
        state = controller.update(state, 0.0)
    assert state.beta < 10.0


BOUNDED = {
    "step": {"target": 0.05, "low": 0.01, "high": 0.4},
    "ziegler": {"episodes_per_step": 9000, "low": 0.01, "high": 0.4},
    "dual": {"target": 0.05, "low": 0.01, "high": 0.4},
    "pid": {"target": 0.05, "low": 0.01, "high": 0.4},
}
anything = st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(-1, 1)), max_size=40)


@pytest.mark.parametrize("name", sorted(BOUNDED))
@given(measured=anything, start=st.just(0.0) | st.floats(0.01, 0.4))
def test_beta_stays_within_its_bounds_whatever_is_measured(name, measured, start):
    for beta in betas(build_controller(name, start, **BOUNDED[name]), measured):
        assert 0.01 <= beta <= 0.4


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize(("beta", "bound"), [(0.5, "high"), (0.001, "low")])
def test_a_beta_outside_the_bounds_is_refused(name, beta, bound):
    """At the bounds it is accepted; beyond them it would run as another β than the one that was asked for."""
    bounds = {"low": 0.01, "high": 0.4}
    inside = {"end": 0.1} if "end" in EVERY[name] else {}
    for at in bounds.values():
        build_controller(name, at, **{**EVERY[name], **bounds, **inside})
    with pytest.raises(KeelError) as caught:
        build_controller(name, beta, **{**EVERY[name], **bounds, **inside})
    for part in (f"kl.beta is {beta:g}", f"kl.controller.{bound} is {bounds[bound]:g}"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_so_is_an_end_outside_of_them(name):
    with pytest.raises(KeelError, match=r"kl\.controller\.end is 0\.5 but kl\.controller\.high is 0\.4"):
        build_controller(name, 0.1, steps=3, end=0.5, high=0.4)


@pytest.mark.parametrize("preset", ["gentle", "ppo"])
def test_bounds_that_were_not_given_count_as_well(preset):
    with pytest.raises(KeelError, match=r"kl\.beta is 500 but kl\.controller\.high"):
        build_controller("step", 500.0, preset=preset)


@pytest.mark.parametrize("name", sorted(EVERY))
@given(measured=anything, warmup=st.integers(0, 5))
def test_beta_is_finite_and_not_negative_whatever_is_measured(name, measured, warmup):
    options = {} if name == "warmup" else {"warmup_steps": warmup}
    for beta in betas(build_controller(name, 0.1, **EVERY[name], **options), measured):
        assert math.isfinite(beta)
        assert beta >= 0


@pytest.mark.parametrize("name", ["step", "ziegler", "dual", "pid"])
@pytest.mark.parametrize("kl", [1.0, 0.0])
def test_a_long_run_far_from_the_target_stays_finite_and_can_come_back(name, kl):
    extra = {"episodes_per_step": 10_000} if name == "ziegler" else {}
    controller = build_controller(name, 0.1, target=0.05, **extra)
    state = controller.init()
    for _ in range(6000):
        state = controller.update(state, kl)
    assert math.isfinite(state.beta)
    far = state.beta
    for _ in range(300):
        state = controller.update(state, 1.0 - kl)
    assert (state.beta < far) if kl else (state.beta > far)


@pytest.mark.parametrize("name", ["step", "ziegler", "dual", "pid"])
@pytest.mark.parametrize("kl", [None, math.nan, math.inf, -math.inf])
def test_holds_still_on_a_missing_or_non_finite_kl(name, kl):
    controller = build_controller(name, 0.1, **EVERY[name])
    state = controller.update(controller.init(), 7.0)
    after = controller.update(state, kl)
    assert after.beta == state.beta
    assert after.step == state.step + 1


@pytest.mark.parametrize("name", sorted(EVERY))
@given(past=st.lists(st.floats(0, 1), max_size=8), future=st.lists(st.floats(0, 1), max_size=8))
def test_restoring_from_json_gives_the_identical_future(name, past, future):
    controller = build_controller(name, 0.1, **EVERY[name])
    state = controller.init()
    for kl in past:
        state = controller.update(state, kl)
    restored = KLState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert restored == state
    other = build_controller(name, 0.1, **EVERY[name])
    for kl in future:
        state, restored = controller.update(state, kl), other.update(restored, kl)
        assert restored == state


@pytest.mark.parametrize("name", ["dual", "pid"])
def test_memory_matters(name):
    """Restoring β alone gives another future: the smoothed KL and the integral are part of the state."""
    controller = build_controller(name, 0.1, **EVERY[name])
    state = controller.init()
    for kl in (0.3, 0.2):
        state = controller.update(state, kl)
    amnesiac = KLState(beta=state.beta, base=state.base, step=state.step)
    assert controller.update(state, 0.06).beta != controller.update(amnesiac, 0.06).beta


@pytest.mark.parametrize("change", [{"extra": 1}, {"beta": ...}])
def test_a_saved_state_that_does_not_fit_is_refused(change):
    data = build_controller("fixed", 0.1).init().to_dict() | change
    if ... in data.values():
        del data["beta"]
    with pytest.raises(KeelError, match=f"missing or unknown: {next(iter(change))}"):
        KLState.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"), [("beta", math.nan), ("beta", -0.1), ("base", math.inf), ("smoothed", math.nan), ("step", "3")]
)
def test_a_saved_state_of_other_numbers_is_refused(name, value):
    """A β that is no number would reach the loss of every step after a resume."""
    data = build_controller("dual", 0.1, target=0.1).init().to_dict() | {name: value}
    with pytest.raises(KeelError, match=f"saved state does not fit: {name} is {value!r}") as refusal:
        KLState.from_dict(json.loads(json.dumps(data)))
    assert "\n" not in str(refusal.value)


UNITS = {name: "per_sequence" if name == "ziegler" else "per_token" for name in EVERY}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_unit_is_declared_and_can_be_set(name):
    assert build_controller(name, 0.1, **EVERY[name]).unit == UNITS[name]
    assert build_controller(name, 0.1, **EVERY[name], unit="per_sequence").unit == "per_sequence"


MISTAKES = [
    ("zieglar", {}, "unknown controller 'zieglar': did you mean 'ziegler'?"),
    ("ziegler", {"horizn": 3}, "unknown controller ziegler parameter 'horizn': did you mean 'horizon'?"),
    ("fixed", {"target": 1.0}, "unknown controller fixed parameter 'target'"),
    ("fixed", {"unit": "per_word"}, "unknown unit 'per_word'"),
    ("fixed", {"warmup_steps": -1}, "warmup_steps must not be negative"),
    ("step", {"preset": "pp"}, "unknown step-rule preset 'pp': did you mean 'ppo'?"),
    ("step", {"target": 0.0}, "target must be positive"),
    ("step", {"target": math.nan}, "kl.controller.target is .nan: expected a finite number"),
    ("step", {"low": 2.0, "high": 1.0}, "0 ≤ low ≤ high"),
    ("step", {"low": -1.0}, "0 ≤ low ≤ high"),
    ("ziegler", {"horizon": 0}, "horizon must be positive"),
    ("dual", {}, "controller dual needs the parameter 'target': give kl.controller.target"),
    ("dual", {"target": "soon"}, "kl.controller.target is the text soon: expected a number"),
    ("dual", {"target": None}, "kl.controller.target is null: expected a number"),
    ("fixed", {"unit": 3}, "kl.controller.unit is 3: expected a text"),
    ("dual", {"target": 0.1, "learning_rate": True}, "kl.controller.learning_rate is true: expected a number"),
    ("warmup", {"steps": 2.5}, "kl.controller.steps is 2.5: expected a whole number"),
    ("dual", {"target": 0.1, "log_space": 1}, "kl.controller.log_space is 1: expected true or false"),
    ("dual", {"target": 0.1, "smoothing": 1.0}, "smoothing must be in [0, 1)"),
    ("dual", {"target": 0.1, "learning_rate": -1.0}, "learning_rate must be positive"),
    ("pid", {"target": -1.0}, "target must be positive"),
    ("linear", {"end": 0.1}, "give kl.controller.steps"),
    ("linear", {"end": 0.1, "steps": 0}, "steps must be positive"),
    ("linear", {"end": math.nan, "steps": 3}, "end"),
    ("cosine", {"end": math.inf, "steps": 3}, "end"),
]


@pytest.mark.parametrize(("name", "options", "says"), MISTAKES)
def test_mistakes_are_one_line(name, options, says):
    with pytest.raises(KeelError) as caught:
        build_controller(name, 0.1, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["step", "ziegler", "dual"])
def test_a_beta_that_would_stay_zero_is_refused(name):
    with pytest.raises(KeelError, match=r"kl\.beta or kl\.controller\.low above 0"):
        build_controller(name, 0.0, **(EVERY[name] | {"low": 0.0}))
    if name == "dual":
        adds = build_controller(name, 0.0, target=0.05, log_space=False, low=0.0)
        assert betas(adds, [0.1])[-1] > 0


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_beta_that_is_no_coefficient_is_refused(name, beta):
    with pytest.raises(KeelError, match="beta must be finite and not negative"):
        build_controller(name, beta, **EVERY[name])


LOOPS = {
    # options, starting β's, how far from the target the mean KL of the last steps may be
    "step": ({"target": 0.05}, 1.5),
    "ziegler": ({"target": 0.05, "episodes_per_step": 2000, "unit": "per_token"}, 1.1),
    "dual": ({"target": 0.05}, 1.1),
    "pid": ({"target": 0.05, "integral": 0.02}, 1.1),
}


@pytest.mark.parametrize("start", [0.01, 1.0])
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_closed_loop_reaches_the_target(name, start):
    """A plant whose KL settles at 0.01/β with a lag (β* = 0.2): every steering rule brings it into its band."""
    options, band = LOOPS[name]
    start = min(start, 0.05) if name == "pid" else start  # pid's β₀ is its floor
    controller = build_controller(name, start, **options)
    state, kl, late = controller.init(), 0.2, []
    for step in range(1500):
        kl += 0.2 * (0.01 / max(state.beta, 1e-6) - kl)
        state = controller.update(state, kl)
        if step >= 1400:
            late.append(kl)
    assert 1 / band <= (sum(late) / len(late)) / 0.05 <= band


@pytest.mark.parametrize("strength", [50, 200, 800])
@pytest.mark.parametrize("pace", [0.05, 0.1, 0.3])
def test_a_lag_before_the_multiplier_keeps_it_out_of_its_band(pace: float, strength: float) -> None:
    """A policy that drifts to 0.2/(1 + strength·β) nats, at its own pace: how many of 80 steps are near the target."""

    def inside(**options: float) -> int:
        controller, kl, count = build_controller("dual", 0.01, target=0.02, **options), 0.0, 0
        state = controller.init()
        for _ in range(80):
            beta, state = state.beta, controller.update(state, kl)
            kl += pace * (0.2 / (1 + strength * beta) - kl)
            count += 0.02 / 1.5 <= kl <= 0.02 * 1.5
        return count

    assert inside() > inside(smoothing=0.9)


class Own(Options):
    factor: PositiveFloat = 1.0


def per_episode(beta: float, options: Own, episodes_per_step: int) -> BetaController:
    return build_controller("fixed", beta * options.factor / episodes_per_step)


def test_the_episodes_of_a_step_are_offered_beside_an_options_class():
    kl = KLOptions(beta=0.4, controller={"name": f"{__name__}:per_episode", "factor": 2.0})
    assert controller_from_options(kl, 8).init().beta == pytest.approx(0.1)
    given = KLOptions(beta=0.1, controller={"name": "ziegler", "episodes_per_step": 3, "horizon": 3})
    assert controller_from_options(given, 8).update(
        given_state := controller_from_options(given, 8).init(), 60.0
    ).beta == pytest.approx(1.2 * given_state.beta)
