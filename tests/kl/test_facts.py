"""Which pairings are refused, with what reason and what instead; what is let through and how it is labelled."""

import itertools

import pytest

from keel.base.errors import KeelError
from keel.kl import FACTS, advise, check_pairing, find_fact
from keel.kl.facts import ALONG, MEANINGS, PAPERS, REFUSED

ZERO, AWAY = "zero: it regularises nothing", "pushes the policy away"
WRONG = "no divergence's gradient"
# estimator, placement, gradient, off-policy, reason, what to use instead
REFUSALS = [
    ("k1", "loss", "plain", False, ZERO, "gradient=auto"),
    ("k1", "loss", "plain", True, AWAY, "gradient=auto"),
    ("k1", "loss", "sg_rho", False, ZERO, "gradient=auto"),
    ("k1", "loss", "sg_rho", True, ZERO, "gradient=auto"),
    ("k2", "loss", "rho", False, WRONG, "gradient=auto"),
    ("k2", "loss", "rho", True, WRONG, "gradient=auto"),
    ("abs", "loss", "rho", True, WRONG, "gradient=auto"),
    *[
        (k, placement, "auto", off, WRONG, "estimator=k1")
        for k in ("k2", "k3", "abs")
        for placement in ("reward", "advantage")
        for off in (False, True)
    ],
    *[("exact", "advantage", "auto", off, ZERO, "estimator=k1") for off in (False, True)],
    *[("exact", "reward", "auto", off, "no divergence's gradient", "estimator=k1") for off in (False, True)],
]


@pytest.mark.parametrize(("estimator", "placement", "gradient", "off", "reason", "instead"), REFUSALS)
def test_refused_with_the_reason_and_the_nearest_right_pairing(estimator, placement, gradient, off, reason, instead):
    with pytest.raises(KeelError) as caught:
        check_pairing(estimator, placement, gradient, off_policy=off)
    message = str(caught.value)
    for part in (f"kl.estimator={estimator}", placement, reason, instead, "kl.allow_biased=true"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(("estimator", "placement", "gradient", "off", "reason", "instead"), REFUSALS)
def test_allow_biased_lets_through_and_still_says_what_it_is(estimator, placement, gradient, off, reason, instead):
    pairing = check_pairing(estimator, placement, gradient, off_policy=off, allow_biased=True)
    assert pairing.expected_gradient in REFUSED
    assert reason in pairing.note


def test_what_the_message_advises_is_accepted():
    for off in (False, True):
        for estimator in ("k1", "k2", "k3", "abs", "exact"):
            assert check_pairing(estimator, "loss", "auto", off_policy=off).expected_gradient == "policy||ref"
        assert check_pairing("k1", "advantage", off_policy=off).expected_gradient == "policy||ref"
    # a reward sums over the completion, and off-policy the token's ratio is not the sequence's
    assert check_pairing("k1", "reward").expected_gradient == "policy||ref"
    assert check_pairing("k1", "reward", off_policy=True).expected_gradient == "near policy||ref"


def test_plain_k3_in_the_loss_is_labelled_forward_kl():
    pairing = check_pairing("k3", "loss", "plain")
    assert pairing.expected_gradient == "ref||policy"
    assert "∇KL(ref‖policy)" in pairing.note


def test_plain_k3_off_policy_is_not_called_a_pull_along_kl_policy_ref():
    """With fresh samples it is ∇KL(ref‖policy); drift does not turn it into the other direction."""
    pairing = check_pairing("k3", "loss", "plain", off_policy=True)
    assert "∇KL(ref‖policy)" in pairing.note
    assert "∇KL(policy‖ref)" not in pairing.note


def test_plain_abs_off_policy_is_not_called_a_kl():
    assert "∇KL(policy‖ref)" not in check_pairing("abs", "loss", "plain", off_policy=True).note


def test_plain_k2_is_right_on_policy_and_only_near_off_policy():
    assert check_pairing("k2", "loss", "plain").expected_gradient == "policy||ref"
    assert check_pairing("k2", "loss", "plain", off_policy=True).expected_gradient == "near policy||ref"
    assert check_pairing("k3", "loss", "k2", off_policy=True).expected_gradient == "near policy||ref"


@pytest.mark.parametrize("off", [False, True])
def test_weighted_forms(off):
    for estimator, form in (("k1", "rho"), ("k3", "rho"), ("k2", "sg_rho"), ("k3", "sg_rho*k2")):
        assert check_pairing(estimator, "loss", form, off_policy=off).expected_gradient == "policy||ref"
    assert check_pairing("k3", "loss", "sg_rho", off_policy=off).expected_gradient == "ref||policy"
    assert check_pairing("exact_reverse", "loss", off_policy=off).expected_gradient == "ref||policy"
    assert check_pairing("jsd", "loss", off_policy=off).expected_gradient == "jsd"
    assert check_pairing("topk", "loss", off_policy=off).expected_gradient == "topk"
    assert check_pairing("topk_unbiased", "loss", off_policy=off).expected_gradient == "policy||ref"


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize(
    ("estimator", "meaning"),
    [("k1", "policy||ref"), ("k2", "policy||ref"), ("exact", "policy||ref"), ("k3", "ref||policy")],
)
def test_sequence_level_in_the_loss(estimator, meaning, off):
    assert check_pairing(estimator, level="sequence", off_policy=off).expected_gradient == meaning


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "exact"])
def test_sequence_level_in_the_reward_takes_k1_only(estimator):
    with pytest.raises(KeelError, match="use estimator=k1 in the reward"):
        check_pairing(estimator, "reward", level="sequence")
    assert check_pairing("k1", "reward", level="sequence").expected_gradient == "policy||ref"


MISTAKES = [
    (("k4", "loss", "auto"), {}, "unknown estimator 'k4': did you mean"),
    (("k3", "los", "auto"), {}, "unknown placement 'los': did you mean 'loss'?"),
    (("k3", "loss", "auto"), {"level": "sequences"}, "unknown level 'sequences': did you mean 'sequence'?"),
    (("k3", "loss", "roh"), {}, "unknown gradient form 'roh': did you mean 'rho'?"),
    (("k1", "reward", "rho"), {}, "kl.gradient=rho does not apply to kl.placement=reward"),
    (("k1", "loss", "rho"), {"level": "sequence"}, "kl.gradient=rho does not apply to kl.level=sequence"),
    (("k1", "loss", "sg_rho*k1"), {}, "an expected gradient that is zero"),
    (("abs", "loss", "auto"), {"level": "sequence"}, "kl.level=sequence has no form for kl.estimator=abs: use"),
    (("abs", "loss", "auto"), {"level": "sequence", "allow_biased": True}, "has no form for kl.estimator=abs: use"),
]


@pytest.mark.parametrize(("arguments", "options", "says"), MISTAKES)
def test_mistakes_are_one_line(arguments, options, says):
    with pytest.raises(KeelError) as caught:
        check_pairing(*arguments, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_are_unique_and_in_known_words():
    keys = [(f.estimator, f.placement, f.sampling, f.gradient, f.level) for f in FACTS]
    assert len(keys) == len(set(keys))
    for fact in FACTS:
        assert fact.expected_gradient in MEANINGS
        known = ("policy||ref", "ref||policy", "jsd", "topk", "none")
        assert fact.value.removeprefix(ALONG) in known


@pytest.mark.parametrize(
    ("estimator", "on", "weighted", "unweighted"),
    [
        ("k1", "policy||ref", "policy||ref", "none"),
        ("k2", "none", "none", "none"),
        ("k3", "policy||ref", "policy||ref", "none"),
        ("abs", "none", "none", "none"),
    ],
)
def test_what_each_value_estimates(estimator, on, weighted, unweighted):
    assert find_fact(estimator, "loss", "on", "plain").value == on
    assert find_fact(estimator, "loss", "off", "rho").value == weighted
    assert find_fact(estimator, "loss", "off", "plain").value == unweighted


def test_a_row_nobody_wrote_is_none():
    assert find_fact("k1", "loss", "on", "rho*other") is None


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "abs", "exact", "exact_reverse"])
def test_a_carrier_decides_the_gradient_whatever_the_value_is(estimator, off):
    """|d| with ρ·k3's gradient is as right as k1 with it."""
    assert check_pairing(estimator, "loss", "rho*k3", off_policy=off).expected_gradient == "policy||ref"
    assert check_pairing(estimator, "loss", "sg_rho*k3", off_policy=off).expected_gradient == "ref||policy"


# placement, level, gradient, what a mean over each completion makes of it
BY_LENGTH = [
    ("k1", "reward", "sequence", "auto", "length-weighted policy||ref"),
    ("k1", "advantage", "token", "auto", "length-weighted policy||ref"),
    ("k1", "advantage", "sequence", "auto", "length-weighted policy||ref"),
    ("k2", "loss", "token", "auto", "length-weighted policy||ref"),
    ("k3", "loss", "token", "plain", "length-weighted ref||policy"),
    ("k1", "loss", "sequence", "auto", "policy||ref"),  # over sequences under every loss
]


@pytest.mark.parametrize(("estimator", "placement", "level", "gradient", "expected"), BY_LENGTH)
def test_a_mean_over_each_completion_is_named(estimator, placement, level, gradient, expected):
    pairing = check_pairing(estimator, placement, gradient, level=level, reduction="sequence_mean")
    assert pairing.expected_gradient == expected
    assert ("1/length" in pairing.note) == expected.startswith("length-weighted")
    even = check_pairing(estimator, placement, gradient, level=level, reduction="constant")
    assert even.expected_gradient == expected.removeprefix("length-weighted ")


def test_drift_is_named_beside_the_lengths():
    pairing = check_pairing("k1", "reward", off_policy=True, reduction="sequence_mean")
    assert pairing.expected_gradient == "near length-weighted policy||ref"
    assert "drift" in pairing.note
    assert "exact where" not in pairing.note


def test_what_is_zero_where_tokens_weigh_alike_is_wrong_by_length():
    """ρ·k1 carries a bare score beside its pull: by length it pushes towards longer completions."""
    wrong = [("k1", "loss", "plain"), ("exact", "advantage", "auto"), ("k1", "loss", "rho"), ("k3", "loss", "rho*k1")]
    for estimator, placement, gradient in wrong:
        with pytest.raises(KeelError, match="no divergence's gradient"):
            check_pairing(estimator, placement, gradient, reduction="sequence_mean")


def ask(*arguments, **options):
    """The pairing, or the text of the refusal."""
    try:
        return check_pairing(*arguments, **options)
    except KeelError as error:
        return str(error)


def test_everything_the_options_allow_gets_an_answer():
    """No combination crashes: it is a pairing or a one-line refusal."""
    for estimator, placement, gradient, level, off in itertools.product(
        ("k1", "k2", "k3", "abs", "exact", "exact_reverse", "jsd", "topk", "topk_unbiased"),
        ("loss", "reward", "advantage"),
        ("auto", "plain", "k2", "rho", "sg_rho", "sg_rho*k2"),
        ("token", "sequence"),
        (False, True),
    ):
        answer = ask(estimator, placement, gradient, level=level, off_policy=off)
        if isinstance(answer, str):
            assert "use " in answer
            assert "\n" not in answer
        else:
            assert answer.expected_gradient not in REFUSED


def test_dr_grpo_with_a_rule_based_verifier_needs_no_kl():
    (note,) = advise("dr_grpo", 0.01)
    assert note.startswith("kl/unneeded")
    assert "0.01" in note
    assert "2503.20783" in note


@pytest.mark.parametrize(("loss", "beta"), [("dr_grpo", 0.0), ("grpo", 0.04)])
def test_nothing_to_say(loss, beta):
    assert advise(loss, beta) == []


def test_a_beta_far_above_the_papers_is_remarked():
    (note,) = advise("grpo", 1.0)
    assert "0.04" in note


@pytest.mark.parametrize(
    ("name", "beta"),
    [
        ("grpo", 0.04),
        ("dr_grpo", 0.0),
        ("dapo", 0.0),
        ("gspo", 0.0),
        ("cispo", 0.0),
        ("gmpo", 0.0),
        ("bnpo", None),
        ("sapo", None),
        ("deepseek-r1", 0.001),
    ],
)
def test_each_papers_beta(name, beta):
    assert PAPERS[name].beta == beta


def test_a_refusal_does_not_advise_a_users_own_estimator_what_cures_nothing():
    """`auto` leaves an estimator of one's own its own gradient."""
    for gradient in ("auto", "plain"):
        with pytest.raises(KeelError, match=r": use estimator=k3 with gradient=auto, or set kl\.allow_biased=true"):
            check_pairing("my_module:own", "loss", gradient)
    assert check_pairing("k3", "loss", "auto").expected_gradient == "policy||ref"
