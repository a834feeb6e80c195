"""What Keel refuses inside TRL, in one line each: arguments, launchers, options, versions."""

import re
from pathlib import Path

import pytest
from trl import GRPOTrainer

import keel
from integrations.small_trl import arguments
from keel.base.errors import KeelError
from keel.integrations import versions
from keel.integrations.trl.settings import check_args, settle
from keel.integrations.versions import TRL
from keel.kl import KLOptions
from keel.trainer.options import GuardOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"optim": "adalomo"}, "no update could be skipped"),
        ({"sync_ref_model": True}, "ReferenceOptions"),
    ],
)
def test_refused_arguments(tmp_path, changes, message):
    with pytest.raises(KeelError, match=message) as refusal:
        check_args(arguments(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("by", ["argument", "launcher"])
def test_refused_fp16(tmp_path, monkeypatch, by):
    """Its scaler leaves out updates by itself: nothing of Keel's counting of them was tried with it."""
    if by == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    args = arguments(tmp_path, fp16=by == "argument")
    with pytest.raises(KeelError, match=r"^fp16 has a scaler .*set bf16=True"):
        check_args(args)


@pytest.mark.parametrize("plugin", ["DeepSpeed", "FSDP"])
def test_refused_launchers(tmp_path, monkeypatch, plugin):
    args = arguments(tmp_path)
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin.upper()}", "true")
    with pytest.raises(KeelError, match=plugin):
        check_args(args)


def test_refused_deepspeed_configuration(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(KeelError, match="DeepSpeed owns its gradients"):
        check_args(args)


def test_refused_async(tmp_path):
    from trl.experimental.async_grpo import AsyncGRPOConfig

    with pytest.raises(KeelError, match="AsyncGRPO"):
        check_args(AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"))


@pytest.mark.parametrize(
    ("beta", "kl", "guards", "message"),
    [
        (0.0, None, None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(estimator="k2"), None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(controller={"name": "step", "target": 0.1}), None, "β is 0 in GRPOConfig"),
        (0.0, KLOptions(beta=0.0, measure_every=0), None, "no reference and no KL"),
        (0.1, KLOptions(beta=0.2), None, "disagree"),
        (0.1, KLOptions(estimator="k1", gradient="plain"), None, "zero"),
        (0.1, KLOptions(placement="reward", estimator="k1"), None, "kl.placement=advantage"),
        (0.1, KLOptions(collect_max=1.0), None, "kl.collect_max"),
        (0.1, KLOptions(budget={"max": 1.0, "action": "rollback"}), None, "rollback is not done inside TRL"),
        (0.1, None, GuardOptions(on_nans="rollback"), "rollback is not done inside TRL"),
        (0.1, None, GuardOptions(max_rollbacks=2), "guards.max_rollbacks is of rollbacks"),
        (0.1, {"estimater": "k2"}, None, "kl.estimater.*kl.estimator"),
        (0.1, {"beta": -1}, None, "kl.beta"),
        (0.1, 0.04, None, "kl is a float: give a KLOptions"),
    ],
)
def test_refused_options(beta, kl, guards, message):
    with pytest.raises(KeelError, match=message) as refusal:
        settle(beta, kl, guards, None)
    assert "\n" not in str(refusal.value)


def test_beta_comes_from_either_place():
    assert settle(0.1, None, None, None).kl.beta == 0.1
    assert settle(0.0, KLOptions(beta=0.2), None, None).kl.beta == 0.2
    assert settle(0.2, KLOptions(beta=0.2), None, None).kl.beta == 0.2
    assert settle(0.0, {"beta": 0.2}, None, None).kl == KLOptions(beta=0.2)
    assert settle(0.1, None, GuardOptions(grad_spike=5.0), None).guards.on_nans == "stop"


@pytest.mark.parametrize("installed", ["1.15.2", "1.17.0", "2.0.0"])
def test_an_untested_version_is_refused(monkeypatch, installed):
    monkeypatch.setattr(versions, "version", lambda name: installed)
    with pytest.raises(KeelError, match=rf"TRL {installed} .*tested with \(1\.16\)"):
        TRL.check_version()


def test_a_trainer_without_what_is_overridden_is_refused():
    class Other:
        _compute_loss = None

    TRL.check_names(GRPOTrainer)
    with pytest.raises(
        KeelError, match=r"^Other has no _generate_and_score_completions with .*pip install 'transformers=="
    ):
        TRL.check_names(Other)


def test_without_trl(monkeypatch):
    def missing(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(KeelError, match=r"pip install 'keel-rl\[trl\]'"):
        TRL.check_version()


def test_nothing_else_imports_trl_or_this_room():
    source = Path(keel.__file__).parent
    room = source / "integrations"
    imports = re.compile(r"^\s*(from|import) (trl|keel\.integrations)\b", re.MULTILINE)
    others = [path for path in source.rglob("*.py") if room not in path.parents]
    assert [path for path in others if imports.search(path.read_text()) and source / "cli" not in path.parents] == []
    assert imports.search((room / "trl" / "trainer.py").read_text())
