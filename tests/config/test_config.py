"""The configuration: defaults of the contract, strict reading, one line for every mistake, names of other trainers."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.options import option_names
from keel.config import Config, load_config, read_config, resolved
from keel.config.checks import advice
from keel.config.load import is_option
from keel.config.peers import table
from keel.config.text import show_config
from keel.kl import CONTROLLERS, controller_from_options
from keel.kl.facts import FACTS
from keel.losses import LOSSES
from keel.reference.kinds import KINDS
from keel.rollout.registry import ENGINES

ROOT = Path(__file__).parents[2]

CONTRACT = """
run:       {name: default, dir: runs, seed: 0, max_steps: 100}
model:     {name: tiny, dtype: auto, attn_implementation: sdpa, lora: null, gradient_checkpointing: false,
            compile: false, trust_remote_code: false}
warmstart: null
task:      {name: arithmetic}
data:      {path: null, split: train, columns: {prompt: question, answer: answer}, system_prompt: null,
            chat_template: auto, max_prompt_length: null, truncation: error}
reward:    {aggregate: sum, warmup_steps: 0, timeout_s: 30}
rollout:   {engine: native, prompts_per_step: 16, num_generations: 8, temperature: 1.0, top_p: 1.0, top_k: 0,
            min_p: 0.0, max_completion_length: 64, max_turns: 1, stop: []}
kl:        {beta: 0.0, estimator: k3, gradient: auto, placement: loss, level: token, reduction: token_mean,
            log_ratio_clamp: 20, exact: false, measure_every: 1, collect_max: null, allow_biased: false,
            controller: {name: fixed}, budget: null}
reference: {kind: auto}
loss:      {loss_type: grpo, delta: null, num_iterations: 1, mask_truncated_completions: false, entropy_coef: 0.0,
            mismatch: {kind: truncate, cap: 2.0}}
optim:     {learning_rate: 1.0e-6, schedule: constant, warmup_steps: 0, weight_decay: 0.0, max_grad_norm: 1.0,
            microbatch_tokens: 8192}
eval:      {every: 20, tasks: [], samples: 64, k: [1, 8]}
parallel:  {sharding: auto, shard_size: null, offload: false}
ray:       null
guards:    {max_consecutive_nans: 5, recovery_lr_factor: 0.5, max_rollbacks: 3, grad_spike: 10.0}
log:       {tensorboard: true, wandb: null}
checkpoint: {every: 50, keep: 3}
"""


def refused(source=None, *overrides):
    """The one line that this configuration is refused with."""
    with pytest.raises(KeelError) as caught:
        load_config(source or {}, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def contains(whole, part):
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return whole == part


def test_defaults_are_the_contract():
    contract = yaml.safe_load(CONTRACT)
    defaults = load_config({}).to_dict()
    assert contains(defaults, contract)
    assert list(defaults) == [*list(contract)[:5], "rewards", *list(contract)[5:], "doctor"]
    # null in the configuration, and the contract's values for its default loss
    here = resolved(load_config({}))
    assert here["loss.epsilon"] == here["loss.epsilon_high"] == 0.2
    assert here["loss.scale_rewards"] == "group"
    assert here["loss.importance_sampling_level"] == "token"


def test_every_option_has_a_sentence():
    def walk(model):
        for name, field in model.model_fields.items():
            assert field.description, name
            assert field.description.endswith((".", "…")), name
            for inner in getattr(field.annotation, "__args__", (field.annotation,)):
                if hasattr(inner, "model_fields"):
                    walk(inner)

    walk(Config)


PARTS = {
    "loss.loss_type": LOSSES,
    "kl.estimator": {fact.estimator: fact for fact in FACTS},
    "kl.controller.name": CONTROLLERS,
    "reference.kind": KINDS,
    "rollout.engine": ENGINES,
}


@pytest.mark.parametrize("option", PARTS)
def test_the_sentence_of_a_part_names_every_built_in(option):
    *path, leaf = option.split(".")
    section = Config
    for name in path:
        section = type(section.model_fields[name].default)
    assert set(PARTS[option]) <= set(re.findall(r"\w+", section.model_fields[leaf].description))


def test_each_loss_has_its_own_limits_and_scaling():
    here = resolved(load_config({}, ["loss.loss_type=dapo"]))
    assert (here["loss.epsilon"], here["loss.epsilon_high"]) == (0.2, 0.28)
    here = resolved(load_config({}, ["loss.loss_type=gspo"]))
    assert (here["loss.epsilon"], here["loss.importance_sampling_level"]) == (3e-4, "sequence")
    assert resolved(load_config({}, ["loss.loss_type=dr_grpo"]))["loss.scale_rewards"] == "none"
    here = resolved(load_config({}, ["loss.loss_type=cispo"]))
    assert here["loss.epsilon_high"] == 5.0
    assert "loss.epsilon" not in here


# ------------------------------------------------------------------------------------------------ reading


def test_file_and_overrides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("kl: {beta: 1e-2}\nmodel:\n  lora: {r: 4}\noptim:\n# all commented out\n", encoding="utf-8")
    config = load_config(path, ["kl.beta=0.05", "rollout.stop=['\\n', end]", "model.lora.alpha=8", "eval.k=[1]"])
    assert config.kl.beta == 0.05
    assert config.model.lora.r == 4
    assert config.model.lora.alpha == 8
    assert config.rollout.stop == ("\\n", "end")
    assert config.eval.k == (1,)
    assert load_config(str(path), ["model.lora=null"]).model.lora is None
    assert load_config(path, ["kl={estimator: k2}"]).kl.beta == 1e-2  # a section is merged, not replaced


def test_numbers_as_people_write_them():
    assert load_config({"optim": {"learning_rate": "1e-6"}}).optim.learning_rate == 1e-6
    assert load_config({}, ["optim.learning_rate=3e-4"]).optim.learning_rate == 3e-4
    config = load_config({}, ["kl.controller.name=step", "kl.controller.low=1e-5"])
    assert config.kl.controller.params == {"low": 1e-5}
    assert load_config({}, ["kl.beta=1"]).kl.beta == 1.0
    assert load_config({}, ["kl.budget=0.2"]).kl.budget.max == 0.2
    assert load_config({}, ["log.wandb=mine"]).log.wandb.project == "mine"


def test_nothing_changes_after_loading():
    config = load_config({})
    with pytest.raises(ValueError):
        config.kl.beta = 1.0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["kl.betta=1"], "unknown option kl.betta: did you mean kl.beta?"),
        (["kl.learning_rate=1"], "did you mean optim.learning_rate"),
        (["model.lora.width=4"], "unknown option model.lora.width: model.lora has adapter, alpha"),
        (["kl_coeff=1"], "did you mean kl.beta?"),
        (["zzz=1"], "no similar option; `keel train --print-config` shows every option, the sections are run, model"),
        (["kl.beta=high"], "kl.beta is the text high: expected a number"),
        (["kl.beta=true"], "expected a number"),
        (["kl.beta=-1"], "kl.beta is -1: it must be at least 0"),
        (["kl.beta=.nan"], "kl.beta is .nan"),
        (["kl.beta=null"], "kl.beta is null: expected a number"),
        (["kl.beta.x=1"], "kl.beta"),
        (["rollout.num_generations=2.5"], "expected a whole number"),
        (["rollout.top_p=0"], "it must be above 0"),
        (["rollout.stop=x"], "expected a list"),
        (["optim.betas=[0.9]"], "optim.betas"),
        (["checkpoint.every=0"], "checkpoint.every is 0: it must be at least 1"),
        (["checkpoint.keep=0"], "at least 1"),
        (["loss.scale_rewards=gruop"], "did you mean group?"),
        (["model=3"], "model is 3: expected a section"),
        (["doctor.thresholds=3"], "doctor.thresholds is 3: expected a section such as {name: value}"),
        (["eval.tasks=[countdown, {name: 3}]"], "eval.tasks[1].name is 3: expected a text"),
        (["kl.beta=0.1", "kl.beta=0.2"], "kl.beta is given twice"),
        (["kl.beta"], "write name=value"),
        (["eval.k=[1"], "the value of eval.k is not YAML"),
    ],
)
def test_mistakes_in_one_option(overrides, says):
    assert says in refused({}, *overrides)


def test_mistakes_in_a_file(tmp_path):
    path = tmp_path / "a.yaml"
    for content, says in (
        ("kl: {beta: 1\n", "is not YAML at line"),
        ("- 1\n", "a list"),
        ("kl:\n  beta: 1\n  beta: 2\n", "'beta' is given twice, on lines 2 and 3"),
        ("kl: {1: 2}\n", "the key 1 in kl"),
        ("{[1]: 2}\n", "a.yaml"),
        ("\tkl: 1\n", "is not YAML"),
        ("kl: " + "[" * 3000, "nested too deeply"),
    ):
        path.write_text(content, encoding="utf-8")
        assert says in refused(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a UTF-8 text file" in refused(path)
    assert str(path) in refused(tmp_path / "aa.yaml")
    assert "without a config.yaml" in refused(tmp_path)
    path.write_text("", encoding="utf-8")
    assert load_config(path) == load_config({})


# ------------------------------------------------------------------------------------------- combinations


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["kl.beta=0.1", "kl.estimator=k1", "kl.gradient=plain"], "zero"),
        (["kl.beta=0.1", "kl.placement=reward"], "use estimator=k1"),
        (["kl.beta=0.1", "kl.estimator=k2", "kl.gradient=rho", "loss.num_iterations=2"], "no divergence's gradient"),
        (["kl.estimator=k9"], "unknown estimator"),
        (["kl.estimator=k1", "kl.gradient=plain", "kl.controller.name=dual", "kl.controller.target=0.1"], "zero"),
        (["kl.placement=reward", "kl.controller.name=dual", "kl.controller.target=0.1"], "use estimator=k1"),
        (["kl.beta=0.1", "kl.estimator=exact", "kl.ratio_cap=2"], "kl.ratio_cap does not apply"),
        (["kl.beta=0.1", "kl.gradient=plain", "kl.ratio_cap=2"], "kl.ratio_cap does not apply"),
        (["kl.beta=0.1", "kl.gradient=k2", "kl.ratio_cap=2"], "kl.ratio_cap does not apply"),
        (["kl.beta=0.1", "kl.ratio_cap=0.5"], "kl.ratio_cap"),
        (["kl.measure_every=0", "kl.beta=0.1"], "kl.measure_every is 0"),
        (["kl.measure_every=0", "kl.controller.name=step"], "needs the measured KL"),
        (["kl.measure_every=0", "reference.kind=kl_triggered"], "needs the measured KL"),
        (["kl.measure_every=0", "kl.budget=0.2"], "kl.budget needs the measured KL"),
        (["kl.controller.name=stepp"], "did you mean 'step'?"),
        (["kl.controller.name=step", "kl.controller.traget=1"], "did you mean 'target'?"),
        (["kl.controller.name=step", "kl.controller.target=soon"], "expected a number"),
        (["kl.controller.name=linear"], "give kl.controller.end"),
        (["kl.placement=advantage", "kl.estimator=k1", "kl.reduction=loss"], "kl.reduction=loss does not apply"),
        (["reference.kind=adapter_off"], "needs LoRA"),
        (["reference.kind=ema", "reference.alhpa=1"], "did you mean 'alpha'?"),
        (["reference.kind=ema", "reference.alpha=2"], "reference.alpha is 2"),
        (["reference.kind=frosen"], "did you mean 'frozen'?"),
        (["rollout.num_generations=1"], "rollout.num_generations to 2"),
        (["rollout.temperature=0"], "rollout.temperature is 0"),
        (
            ["rollout.temperature=5e-324"],
            "rollout.temperature is 5e-324: expected 0, which is greedy, or at least 1e-06",
        ),
        (["loss.epsilon_high=1e308"], "loss.epsilon_high is 1e+308: expected a number between ±1e+38"),
        (["loss.mismatch.cap=1e39"], "loss.mismatch.cap is 1e+39: expected a number between ±1e+38"),
        (["eval.temperature=1e-12"], "eval.temperature is 1e-12: expected 0, which is greedy, or at least 1e-06"),
        (["rollout.engine=nativ"], "did you mean 'native'?"),
        (["rollout.engine=mine:Engine", "rollout.kv_cache_gib=2"], "rollout.kv_cache_gib is for the engine native"),
        (["rollout.engine=mine:Engine", "rollout.cuda_graphs=false"], "rollout.cuda_graphs is for the engine native"),
        (["rollout.engine=nowhere:engine"], "cannot import rollout.engine=nowhere:engine"),
        (["rollout.kv_cache_gib=-1"], "kv_cache_gib"),
        (["loss.loss_type=cispo", "loss.epsilon=0.2"], "cispo"),
        (["loss.delta=1.1"], "must be above"),
        (["loss.loss_type=grpoo"], "did you mean 'grpo'?"),
        (["loss.mismatch.kind=icepop"], "needs a floor"),
        (["loss.loss_type=policy_gradient", "loss.num_iterations=2"], "one update per batch"),
        (["optim.minibatches=20"], "optim.minibatches is 20"),
        (["model.quantization=4bit"], "needs LoRA"),
        (["task.name=arithmetik"], "did you mean 'arithmetic'?"),
        (["task.foo=1"], "task: "),
        (["--datasets=rows.jsonl", "task.name=capitals"], "generates its problems"),
        (["data.split=test"], "data.split is given, but task arithmetic generates its problems"),
        (["task.name=dataset"], "needs data.path"),
        (["data.truncation=drop"], "needs data.max_prompt_length"),
        (["data.path=a.jsonl", "task.data={path: b.jsonl}"], "both name data"),
        (["rewards=[{name: exakt}]"], "rewards[0]: "),
        (["rewards=[]"], "rewards"),
        (["task.name=nowhere:task"], "cannot import"),
        (["loss.loss_type=nowhere:loss"], "cannot import loss.loss_type=nowhere:loss"),
        (["eval.temperature=0"], "pass@8"),
        (["rollout.max_staleness=1", "loss.mismatch.kind=none"], "loss.mismatch.kind=none"),
        (["rollout.max_staleness=1", "kl.beta=0.1", "kl.estimator=k2", "kl.gradient=rho"], "no divergence's gradient"),
        (["rollout.max_staleness=1", "loss.loss_type=policy_gradient", "loss.num_iterations=2"], "has no ratio"),
    ],
)
def test_impossible_combinations(overrides, says):
    assert says in refused({}, *overrides)


def test_at_beta_0_the_pairing_does_not_matter():
    assert not load_config({}, ["kl.placement=reward", "kl.measure_every=0"]).needs_reference
    assert load_config({}).needs_reference


def test_a_loss_without_a_ratio_takes_stale_samples():
    """Its one update is at the old policy, whose weight over the sampler it has."""
    config = load_config({}, ["rollout.max_staleness=1", "loss.loss_type=policy_gradient"])
    assert config.off_policy


def test_exact_and_episodes_follow_from_the_rest():
    config = load_config({}, ["kl.estimator=exact", "kl.controller.name=ziegler", "kl.beta=0.1"])
    assert config.kl.needs_exact
    controller = controller_from_options(config.kl, config.episodes_per_step)
    after = controller.update(controller.init(), 1e9)
    assert after.beta == pytest.approx(0.1 * (1 + 128 / 10_000 * 0.2))  # 16 prompts × 8 completions


# ------------------------------------------------------------------------------------------------ aliases


def test_aliases_that_disagree_are_refused():
    assert "both set kl.beta" in refused({"beta": 0.1, "kl_coef": 0.2})
    assert "both set kl.beta" in refused({"kl": {"beta": 0.1}, "kl_coef": 0.2})
    assert load_config({"beta": 0.1, "kl_coef": 0.1}).kl.beta == 0.1


def test_every_alias_leads_to_an_option():
    names = set(option_names(Config))
    for alias in table().values():
        assert not alias.target or alias.target in names or is_option(alias.target), alias.name
        assert alias.target or alias.note, alias.name
        if alias.convert is None and alias.target:
            assert alias.apply(1, {}) == {alias.target: 1}


def test_every_option_of_trl_is_known():
    """Read from TRL's source: each option of its GRPOConfig is translated, or refused with a reason."""
    where = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "trainer" / "grpo_config.py"
    tree = ast.parse(where.read_text(encoding="utf-8"))
    options = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    assert len(options) > 50
    assert options <= set(table()), sorted(options - set(table()))


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path):
    config = load_config(path)
    assert load_config(yaml.safe_load(show_config(config).replace("1e-", "1.0e-"))) == config


def test_what_is_shown_loads_to_the_same(tmp_path):
    config = load_config(
        {"warmstart": {"task": ["arithmetic", {"name": "countdown"}], "steps": 3}},
        [
            "rollout.stop=['#', 'a: b', \"\\n\"]",
            "kl.budget=0.2",
            "log.wandb=true",
            "kl.controller.name=dual",
            "kl.controller.target=0.1",
            "model.lora.targets=[q, 'yes']",
            "run.name='007'",
        ],
    )
    path = tmp_path / "shown.yaml"
    path.write_text(show_config(config), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(config.to_dict()) == load_config(config) == config


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(option=st.sampled_from([*option_names(Config), *table()]), value=VALUES)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(option, value):
    message = ""
    try:
        assert show_config(load_config({option: value}))
    except KeelError as error:
        message = str(error)
    assert "\n" not in message


OTHER_PARTS = [
    ({"task": {"name": "arithmetic", "skill": "sort", "digits": 6}}, "task", "name", "capitals", {"held_out": 8}),
    ({"task": {"skill": "sort"}}, "task", "name", "countdown", {"high": 9}),  # arithmetic by default
    (
        {"kl": {"beta": 0.1, "controller": {"name": "linear", "end": 0.2, "steps": 3}}},
        "kl.controller",
        "name",
        "pid",
        {"target": 0.05},
    ),
    ({"reference": {"kind": "ema", "alpha": 0.5, "every": 3}}, "reference", "kind", "snapshot", {"every": 7}),
    ({"loss": {"loss_type": "sapo", "sapo_temperature_pos": 2.0}}, "loss", "loss_type", "grpo", {"delta": 3.0}),
]


@pytest.mark.parametrize(("source", "section", "key", "name", "parameters"), OTHER_PARTS)
@pytest.mark.parametrize("name_first", [True, False])
def test_another_part_starts_with_its_own_parameters(source, section, key, name, parameters, name_first):
    """Those of the part before do not stay; those that are given along with the name apply, in either order."""
    path, expected = section.split("."), {section.split(".")[-1]: {key: name, **parameters}}
    for part in reversed(path[:-1]):
        expected = {part: expected}
    kept = ["kl.beta=0.1"] if section == "kl.controller" else []
    given = [f"{section}.{key}={name}", *(f"{section}.{option}={value}" for option, value in parameters.items())]
    config, notes = read_config(source, given if name_first else given[::-1])
    assert config == load_config(expected, kept)
    (note,) = notes
    was = _leaf(source, path, key) or "arithmetic"
    assert f"{section}.{key}={name}" in note
    assert was in note
    assert all(f"{section}.{option}=" in note for option in _leaf(source, path) if option != key)


def _leaf(tree, path, key=None):
    for part in path:
        tree = tree[part]
    return tree if key is None else tree.get(key)


@pytest.mark.parametrize(("source", "section", "key", "name", "parameters"), OTHER_PARTS)
def test_the_same_part_keeps_its_parameters(source, section, key, name, parameters):
    now = _leaf(source, section.split("."), key) or "arithmetic"
    assert read_config(source, [f"{section}.{key}={now}"]) == (load_config(source), [])


def test_a_shipped_configuration_takes_another_task():
    """`keel train task.name=…` begins with configs/default.yaml, whose task has parameters."""
    assert load_config("default", ["task.name=capitals"]).task.params == {}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optim.schedule=linear", "optim.warmup_steps=10"], ("optim.warmup_steps is 10", "run.max_steps is 4")),
        (["optim.warmup_steps=10"], ("optim.warmup_steps is 10", "run.max_steps is 4")),
        (
            ["optim.schedule=cosine", "optim.warmup_steps=3", "optim.decay_steps=2"],
            ("optim.warmup_steps is 3", "optim.decay_steps is 2"),
        ),
        (["warmstart.steps=5", "warmstart.warmup_steps=6"], ("warmstart.warmup_steps is 6", "warmstart.steps is 5")),
        (["reward.warmup_steps=5"], ("reward.warmup_steps is 5", "run.max_steps is 4")),
        (
            ["kl.beta=0.1", "kl.controller.warmup_steps=5"],
            ("kl.controller.warmup_steps is 5", "run.max_steps is 4"),
        ),
        (
            ["kl.beta=0.1", "kl.controller.name=warmup", "kl.controller.steps=5"],
            ("kl.controller.steps is 5", "run.max_steps is 4"),
        ),
    ],
)
def test_a_warm_up_that_outlasts_the_run_is_said(overrides, named):
    (note,) = [line for line in advice(load_config({"run": {"max_steps": 4}}, overrides)) if "warm-up" in line]
    assert all(part in note for part in named)
    shorter = [
        override for override in overrides if "decay_steps" not in override and "warmstart.steps" not in override
    ]
    longer = load_config({"run": {"max_steps": 400}}, shorter)
    assert not [line for line in advice(longer) if "warm-up" in line]


def test_the_shipped_configuration_runs_for_a_few_steps():
    config = load_config("default", ["run.max_steps=4"])
    assert any("optim.warmup_steps is 10" in note and "run.max_steps is 4" in note for note in advice(config))


@pytest.mark.parametrize(
    ("source", "override", "counted"),
    [
        ({}, "batch_size=8", "8 prompts × 8 completions = 64 completions a step"),
        ({"rollout": {"num_generations": 4}}, "--batch-size=8", "8 prompts × 4 completions = 32 completions a step"),
        ({"num_generations": 4}, "per_device_train_batch_size=32", "8 prompts × 4 completions = 32 completions a step"),
    ],
)
def test_a_batch_size_says_what_it_counts(source, override, counted):
    config, notes = read_config(source, [override])
    assert config.episodes_per_step == int(counted.split(" = ")[1].split()[0])
    assert any("rollout.prompts_per_step=8" in note and counted in note for note in notes)


UNREAD = [
    ("parallel.shard_size=3", "parallel.sharding", "full", "hybrid"),
    ("parallel.shard_size=3", "parallel.sharding", "auto", "hybrid"),
    ("parallel.offload=true", "parallel.sharding", "none", "full"),
    ("optim.decay_steps=9", "optim.schedule", "constant", "cosine"),
    ("loss.mismatch.cap=3", "loss.mismatch.kind", "none", "truncate"),
    ("loss.mismatch.level=sequence", "loss.mismatch.kind", "none", "mask"),
    ("loss.dynamic_sampling_rounds=5", "loss.dynamic_sampling", "false", "true"),
]


@pytest.mark.parametrize(("given", "other", "off", "on"), UNREAD)
def test_an_option_that_would_not_be_read_is_refused(given, other, off, on):
    load_config({}, [given, f"{other}={on}"])
    with pytest.raises(KeelError) as caught:
        load_config({}, [given, f"{other}={off}"])
    said = str(caught.value)
    assert given.partition("=")[0] in said
    assert f"{other}={off}" in said
    assert on in said.partition("leave it out")[2]
    assert "\n" not in said


def test_a_missing_configuration_suggests_similar_names_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".pre-commit-config.yaml", "mkdocs.yml", "stronger.yaml"):
        Path(name).write_text("{}")
    suggested = {"strongr.yaml": "stronger.yaml", "defalt": "default", "unlike.yaml": None}
    for missing, expected in suggested.items():
        with pytest.raises(KeelError) as error:
            load_config(missing)
        shown = str(error.value).removeprefix(f"no configuration at {missing}")
        assert "mkdocs" not in shown
        assert "pre-commit" not in shown
        assert expected is None or expected in shown
