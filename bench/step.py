"""The whole step, Keel against TRL: `keel train` with its loop, judge, records and guards beside TRL's GRPOTrainer.

    python bench/step.py --job cpu-37              # 2 prompts of 37 tokens × 8 completions × 32 tokens, SmolLM2-135M
    python bench/step.py --job cpu-512             # the same with prompts of 512 tokens
    python bench/step.py --job long-prompt         # 1 prompt of 2,300 tokens × 8 × 128 tokens, a random Llama of 19M
    python bench/step.py --device cuda --repeats 1 --steps 4 --job h200 --job h200-ragged
    python bench/step.py --device cuda --repeats 1 --steps 3 --job 7b-lora --job 7b --job 32b-lora
    python bench/step.py --device cuda --job gsm8k --model FOLDER --data train.jsonl
    python bench/step.py --job tiny --side keel    # one side only

`h200` is a Llama shape of 1.54B parameters in bfloat16, 16 prompts of 512 tokens × 8 completions of 256;
`h200-ragged` the same with completions of 64 to 256 tokens, `h200-1024` with completions of 1,024. `gsm8k` is
SmolLM2-135M with fp32 weights and bfloat16 passes, 32 prompts × 16 completions of at most 200 tokens: with a model and
data it runs configs/gsm8k.yaml and completions end where the model ends them, without them it is the same shape with
random weights and completions of 95 tokens on average. `exact-kl` is `h200` by Keel with the KL of sampled tokens and
with the exact one, `sft` the supervised start in SmolLM2's shape, 32 examples a step. `1.5b-lora` to `32b-lora` are
`h200-ragged` in other shapes, with full weights or LoRA of rank 16 on all linear layers; random weights that no side
reads from a folder are made in the GPU's memory. The `tiny` jobs show that it
runs, also with --side keel-exact-kl or keel-sft. `start` is the time from the command to the first step's end, with
imports, loading, trials and the capture of graphs, and without making the weights.

The sides take turns, `--repeats` of them, so that a machine whose speed changes changes both. A turn is a process of
its own, so that its peak memory is its own: `--steps` steps, the first of which is shown apart and not counted. A step
is the time from one step's end to the next one's, with all that lies between; a checkpoint at the default cadence does
not fall into it. Prompts, lengths and, where they are forced, the length of each completion are the same on both sides
and new in each step. Reported are medians, and as `ratio` the median of the second side's time over the first's in the
same turn. Neither side recomputes activations (TRL's default gradient checkpointing is switched off, in TRL's favour)
and TRL logs nothing. On a GPU peak memory is the allocator's, and TF32 is off. The last line of a job is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import random_model
from random_model import SMALL, save_random_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from get_smollm2 import default_folder

BEGAN = time.perf_counter()
GSM8K = Path(__file__).resolve().parents[1] / "configs" / "gsm8k.yaml"
BETA, LEARNING_RATE = 0.04, 1e-6
TRL_VERSION = "1.16.0"  # the wrapped methods are private: another version may time something else
PHASES = ("rollout", "reference", "update")
LARGE = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
LARGE |= {"num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
SHAPES = {  # the hidden size, the MLP's, layers, heads, KV heads, the vocabulary, tied embeddings
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
}
_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@dataclass(frozen=True)
class Job:
    """What a step has to do. Lengths are drawn between two bounds; `typical` is the commonest length of a completion,
    without it all are equally common. `shape` is a random model's; None is SmolLM2-135M's folder.
    """

    prompts: int
    group: int
    prompt: tuple[int, int]
    completion: tuple[int, int]
    typical: int | None = None
    shape: dict[str, int] | None = None
    lora: int | None = None  # the rank
    weights: str = "float32"
    passes: str = "float32"
    microbatch_tokens: int = 8192  # Keel's
    rows: int | None = None  # completions of a pass of TRL's; None: all
    sides: tuple[str, ...] = ("keel", "trl")
    data: str | None = None  # configs/gsm8k.yaml on this file, in place of made-up prompts and forced lengths

    def prompt_length(self, step: int, number: int) -> int:
        return _draw(f"prompt/{step}/{number}", self.prompt)

    def length(self, step: int, group: int, sample: int) -> int:
        """The tokens of one completion."""
        return _draw(f"{step}/{group}/{sample}", self.completion, self.typical)

    def lengths(self, step: int) -> list[int]:
        """Those of all completions of a step, group by group."""
        return [self.length(step, group, sample) for group in range(self.prompts) for sample in range(self.group)]


def _draw(key: str, bounds: tuple[int, int], typical: int | None = None) -> int:
    drawn = random.Random(key)
    return drawn.randint(*bounds) if typical is None else round(drawn.triangular(*bounds, typical))


_H200 = Job(
    16, 8, (512, 512), (256, 256), shape=LARGE, weights="bfloat16", passes="bfloat16", microbatch_tokens=10240, rows=32
)
_GSM8K = Job(
    32, 16, (60, 180), (20, 200), 65, shape=SMOLLM2, passes="bfloat16", microbatch_tokens=16384, rows=64
)  # 95 tokens on average
_RAGGED = replace(_H200, completion=(64, 256))


def _sized(name: str, lora: int | None = 16, **how: Any) -> Job:
    *sizes, vocabulary, tied = SHAPES[name]
    shape = dict(zip(_KEYS, sizes, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    return replace(_RAGGED, shape=shape | {"max_position_embeddings": 4096}, lora=lora, rows=16, **how)


JOBS = {
    "tiny": Job(2, 4, (12, 12), (8, 8), shape=TINY),
    "tiny-lora": Job(2, 4, (12, 12), (8, 8), shape=TINY, lora=4),
    "tiny-ragged": Job(2, 4, (8, 12), (2, 8), shape=TINY, rows=4),
    "cpu-37": Job(2, 8, (37, 37), (32, 32)),
    "cpu-512": Job(2, 8, (512, 512), (32, 32)),
    "long-prompt": Job(1, 8, (2300, 2300), (128, 128), shape=SMALL),
    "h200": _H200,
    "h200-ragged": _RAGGED,
    "h200-1024": replace(_H200, completion=(1024, 1024), microbatch_tokens=17408, rows=16),
    "1.5b-lora": replace(_RAGGED, lora=16),
    "3b": _sized("3b", None, sides=("keel",)),
    "7b": _sized("7b", None, sides=("keel",), microbatch_tokens=4096),
    "7b-lora": _sized("7b", microbatch_tokens=6144),
    "8b-lora": _sized("8b", microbatch_tokens=6144),
    "14b-lora": _sized("14b", microbatch_tokens=6144),
    "32b-lora": _sized("32b", sides=("keel",), microbatch_tokens=4096),
    "gsm8k": _GSM8K,
    "sft": replace(_GSM8K, group=1, sides=("keel-sft",)),
    "exact-kl": replace(_H200, sides=("keel", "keel-exact-kl")),
}
WORDS = (
    *("time", "year", "people", "way", "day", "thing", "life", "world", "school", "state", "family", "group"),
    "country",
)


@dataclass(frozen=True)
class Work:
    """A turn of a side: so many steps of a job with a model's folder, or with a model that is made in memory."""

    name: str
    job: Job
    model: str | None
    steps: int
    device: str

    def tokenizer(self) -> Any:
        if self.model is None:
            return random_model.word_tokenizer(WORDS, self.job.shape)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)


def make_prompts(tokenizer: Any, job: Job, step: int) -> list[str]:
    """A step's texts of exactly so many tokens, each different, and stable when encoded again."""
    return [
        make_text(tokenizer, step * job.prompts + number, job.prompt_length(step, number))
        for number in range(job.prompts)
    ]


def make_text(tokenizer: Any, number: int, tokens: int) -> str:
    words = [WORDS[(number * 7 + (3 + number // len(WORDS)) * i) % len(WORDS)] for i in range(2 * tokens)]
    ids = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"][:tokens]
    text: str = tokenizer.decode(ids)
    if len(tokenizer(text, add_special_tokens=False)["input_ids"]) != tokens:
        raise SystemExit(f"bench/step.py: this tokenizer does not cut cleanly at {tokens} tokens")
    return text


class Clock:
    """Seconds by phase; on a GPU, of work that is done and not only asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.phases: dict[str, float] = {}

    def now(self) -> float:
        """Seconds, after all that was asked of the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, with its time added to a phase."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            try:
                return work(*args, **kwargs)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + self.now() - started

        return wrapped

    def take(self) -> dict[str, float]:
        """The phases so far, and a fresh start."""
        phases, self.phases = self.phases, {}
        return phases


def peak_gib(device: str) -> float:
    """The process's largest resident memory, or what the GPU's allocator gave out at most."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def checksum(text: str) -> float:
    """Any reward that differs within a group and is the same in every process: the time does not depend on it."""
    return float(zlib.crc32(text.encode()) % 7)


def check_trl() -> None:
    """Refuse to compare with a TRL other than the one whose phases were read."""
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != TRL_VERSION:
        raise SystemExit(
            f"bench/step.py: TRL {TRL_VERSION} is compared with, {installed} is installed: "
            f"pip install trl=={TRL_VERSION}"
        )


def keel_overrides(work: Work) -> list[str]:
    """The job as options of `keel train`."""
    job = work.job
    shared = [
        f"model.name={work.model or 'random_model:made'}",
        f"model.dtype={job.weights}",
        f"model.device={work.device}",
        f"rollout.prompts_per_step={job.prompts}",
        f"rollout.num_generations={max(2, job.group)}",  # a supervised start samples none
        f"rollout.max_completion_length={job.completion[1]}",
        f"kl.beta={BETA}",
        "loss.loss_type=grpo",
        f"optim.learning_rate={LEARNING_RATE}",
        f"optim.precision={'auto' if job.passes == job.weights else job.passes}",
        f"optim.microbatch_tokens={job.microbatch_tokens}",
        "optim.warmup_steps=0",
        "eval.samples=1",
        "eval.k=[1]",
        "guards.on_nans=stop",  # no checkpoint before the first step
    ]
    if job.lora:
        shared.append(f"model.lora={{r: {job.lora}, alpha: {2 * job.lora}, targets: all-linear}}")
    return [*shared, f"data.path={job.data}" if job.data else "data.chat_template=none"]


def keel_task(job: Job, tokenizer: Any) -> Any:
    """A task of made-up prompts; its gold answers are of the completions' lengths."""
    from keel.base.types import Problem, Reward
    from keel.envs import Task

    class MadeUp(Task):
        name = "made_up"

        def sample(self, number: int, *, seed: int, step: int) -> list[Problem]:
            return [
                Problem(f"{step}/{i}", text, answer=make_text(tokenizer, i, job.length(step, i, 0) - 1))
                for i, text in enumerate(make_prompts(tokenizer, job, step))
            ]

        def held_out(self, number: int, *, seed: int = 0) -> list[Problem]:
            return [replace(problem, key="held out") for problem in self.sample(1, seed=0, step=10**6)[:1]]

        def gold(self, problem: Problem) -> str:
            return str(problem.answer)

        def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
            return Reward(checksum(turns[-1]))

    return MadeUp()


def since_command() -> float:
    """Seconds since the command began, without those in which random weights were made."""
    return time.perf_counter() - BEGAN - float(random_model.made_of.get("seconds", 0.0))


def force_lengths(job: Job) -> None:
    """Let Keel's native engine draw completions of the job's lengths, whatever it is asked for."""
    from keel.rollout import registry
    from keel.rollout.engine import EngineWrapper

    class ForcedLengths(EngineWrapper):
        def generate(self, requests: Any, sampling: Any, **noise: int) -> Any:
            drawn = [request.drawn(sampling) for request in requests]
            single = [
                replace(request, samples=(sample,), max_new=job.length(noise["step"], group, sample))
                for group, (request, samples) in enumerate(zip(requests, drawn, strict=True))
                for sample in samples
            ]
            completions = iter(self.inner.generate(single, replace(sampling, ignore_eos=True), **noise))
            return [[next(completions)[0] for _ in samples] for samples in drawn]

    native = registry.native
    registry.ENGINES["native"] = lambda model, tokenizer, *, rollout: ForcedLengths(
        native(model, tokenizer, rollout=rollout)
    )


class Enough(Exception):
    """The steps that were asked for are done: no last evaluation, no checkpoint."""


def run_keel(work: Work, *more: str) -> list[dict[str, float]]:
    """`keel train`: its own times of the phases, and the time from one step's end to the next one's."""
    import keel

    job, results = work.job, list[dict[str, float]]()
    task = None
    if job.data is None:
        force_lengths(job)
        task = keel_task(job, work.tokenizer())
    ended = [0.0]

    def measure(state: Any, metrics: Any) -> None:
        before, ended[0] = ended[0], time.perf_counter()
        phases = dict(zip(PHASES, (metrics[f"time/{name}_s"] for name in ("rollout", "score", "update")), strict=True))
        total = ended[0] - before if results else metrics["time/total_s"]
        tokens = metrics["length/mean"] * job.prompts * job.group
        results.append({**phases, "total": total, "tokens": tokens, "peak_gib": metrics["memory/peak_gib"]})
        if len(results) == 1:
            results[0]["start"] = since_command()
        if len(results) == work.steps:
            raise Enough

    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", f"run.max_steps={work.steps + 1}"]
        config = {} if job.data is None else str(GSM8K)
        try:
            keel.train(config, task, callbacks=[measure], overrides=[*keel_overrides(work), *run, *more])
        except Enough:
            show_notes(Path(folder))
            return results
    raise SystemExit("bench/step.py: the run ended before its steps were done")


def show_notes(folder: Path) -> None:
    """The notes of the run in this folder: which part is off its fastest path, and why."""
    for file in folder.glob("*/events.jsonl"):
        for event in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if event["kind"] == "note":
                print(f"note: {event['message']}", file=sys.stderr, flush=True)


def run_keel_exact_kl(work: Work) -> list[dict[str, float]]:
    """`keel train` with the exact KL as penalty and measurement."""
    return run_keel(work, "kl.estimator=exact", "kl.exact=true")


def run_keel_sft(work: Work) -> list[dict[str, float]]:
    """The supervised start of `keel train` and `keel sft`, without their run directory."""
    from keel.config import load_config
    from keel.run.build import build_policy, build_warmstart
    from keel.trainer.sft import sft

    job = work.job
    start = f"warmstart={{steps: {work.steps}, batch_size: {job.prompts}}}"
    config = load_config({}, [*keel_overrides(work), start])
    loaded, results = build_policy(config), list[dict[str, float]]()
    ended = [time.perf_counter()]

    def report(step: int, line: Any) -> None:
        before, ended[0] = ended[0], time.perf_counter()
        spent = ended[0] - before
        tokens = sum(job.length(step - 1, number, 0) for number in range(job.prompts))
        results.append({"update": spent, "total": spent, "tokens": tokens, "peak_gib": peak_gib(work.device)})

    sft(loaded, *build_warmstart(config, loaded, keel_task(job, loaded.tokenizer)), report)
    return results


class ForcedEnds:
    """A logits processor: row i draws the end-of-sequence token as its `lengths[i]`-th token and never before."""

    def __init__(self, lengths: Sequence[int], eos_ids: Sequence[int]) -> None:
        self.lengths, self.eos_ids, self.position = lengths, list(eos_ids), 0
        self._ends: Any = None

    def __call__(self, ids: Any, scores: Any) -> Any:
        import torch

        if self._ends is None:
            self._ends = torch.tensor(self.lengths, device=scores.device)
        self.position += 1
        for token in self.eos_ids[1:]:
            scores[:, token] = -torch.inf
        scores[:, self.eos_ids[0]] = torch.where(self._ends == self.position, 1e4, -torch.inf).to(scores)
        return scores


def trl_problems(work: Work, tokenizer: Any) -> tuple[dict[str, list[Any]], Callable[..., list[float]]]:
    """The rows of TRL's dataset, step after step, and their reward."""
    job = work.job
    if job.data is None:
        prompts = [prompt for step in range(work.steps) for prompt in make_prompts(tokenizer, job, step)]
        return {"prompt": prompts}, lambda completions, **_: [checksum(completion) for completion in completions]
    from keel.config import load_config
    from keel.run.build import build_named_task

    config = load_config(str(GSM8K), keel_overrides(work))
    task = build_named_task(config.task, config)
    problems = [p for step in range(work.steps) for p in task.sample(job.prompts, seed=config.run.seed, step=step)]

    def reward(completions: Any, number: list[int], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [task.reward(problems[i], [text]).total for i, text in zip(number, texts, strict=True)]

    return {"prompt": [problem.prompt for problem in problems], "number": list(range(len(problems)))}, reward


def trl_adapters(job: Job) -> Any:
    if job.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type="CAUSAL_LM")


def run_trl(work: Work) -> list[dict[str, float]]:
    """TRL's GRPOTrainer on the same job; its phases are timed by wrapping its own methods."""
    import torch
    from datasets import Dataset
    from transformers import LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job, device = work.job, work.device
    tokenizer = work.tokenizer()
    clock, results = Clock(device), list[dict[str, float]]()
    ended, tokens = [0.0], [0]

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not results:
                ended[0] = clock.now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            phases, before = clock.take(), ended[0]
            ended[0] = clock.now()
            total = ended[0] - before
            update = total - phases.pop("inputs")
            results.append({**phases, "update": update, "total": total, "tokens": tokens[0]})
            results[0].setdefault("start", since_command())

    columns, reward = trl_problems(work, tokenizer)
    rows = job.prompts * job.group
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job.rows or rows,
            gradient_accumulation_steps=rows // (job.rows or rows),
            num_generations=job.group,
            max_completion_length=job.completion[1],
            shuffle_dataset=False,
            beta=BETA,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=work.steps,
            bf16=job.passes == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=device == "cpu",
            tf32=None if device == "cpu" else False,
            model_init_kwargs={"dtype": job.weights} if work.model else None,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=work.model or random_model.made()[0],
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[StepTimer()],
            peft_config=trl_adapters(job),
        )
        generate, calls = trainer.model.generate, count()

        def forced(*args: Any, **kwargs: Any) -> Any:
            ends = ForcedEnds(job.lengths(next(calls)), trainer.eos_token_ids)
            return generate(*args, **kwargs, logits_processor=LogitsProcessorList([ends]))

        if job.data is None:
            trainer.model.generate = forced
        turn, score = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

        def counted(*args: Any, **kwargs: Any) -> Any:
            completions, logprobs = turn(*args, **kwargs)
            tokens[0] = sum(map(len, completions))
            return completions, logprobs

        def score_timed(*args: Any, **kwargs: Any) -> Any:
            # no_grad around generation and scoring is TRL's own; a step begins before its batch is generated
            return (score if torch.is_grad_enabled() else clock.timed("reference", score))(*args, **kwargs)

        trainer._generate_single_turn = clock.timed("rollout", counted)
        trainer._get_per_token_logps_and_entropies = score_timed
        trainer._prepare_inputs = clock.timed("inputs", trainer._prepare_inputs)
        trainer.train()
    return [{**result, "peak_gib": peak_gib(device)} for result in results]


SIDES: dict[str, Callable[[Work], list[dict[str, float]]]] = {
    "keel": run_keel,
    "trl": run_trl,
    "keel-exact-kl": run_keel_exact_kl,
    "keel-sft": run_keel_sft,
}


def summarise(steps: list[dict[str, float]]) -> dict[str, float]:
    """One turn: medians over the steps after the first, which is shown apart; `rest` is what no phase has."""
    start = steps[0].pop("start", 0.0)
    whole = [{**dict.fromkeys(PHASES, 0.0), **step} for step in steps]
    for step in whole:
        step["rest"] = step["total"] - sum(step[name] for name in PHASES)
        step["token_us"] = 1e6 * step["total"] / step["tokens"]
    figures = {key: statistics.median(step[key] for step in whole[1:]) for key in whole[0]}
    figures["peak_gib"] = max(step["peak_gib"] for step in whole)
    return {**figures, "first": steps[0]["total"], "second": steps[1]["total"], "start": start}


def measure_apart(side: str, work: Work, threads: int) -> dict[str, float]:
    """One turn of a side in a fresh process: the JSON on its last line, shown at once, since the next may fail."""
    command = [sys.executable, __file__, "--job", work.name, "--side", side, "--here"]
    command += ["--model", work.model] if work.model else []
    command += ["--threads", str(threads), "--device", work.device, "--steps", str(work.steps)]
    command += ["--data", work.job.data] if work.job.data else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"bench/step.py: the {side} side failed, for the reason above")
    line = done.stdout.strip().splitlines()[-1]
    print(f"{work.name}, {side}: {line}", file=sys.stderr, flush=True)
    return json.loads(line)


def take_turns(sides: Sequence[str], repeats: int, measure: Callable[[str], Any]) -> dict[str, list[Any]]:
    """`repeats` turns of each side, alternating, and every other round in the opposite order."""
    turns: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(repeats):
        for side in sides if number % 2 == 0 else reversed(sides):
            turns[side].append(measure(side))
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=sorted(JOBS), help="may be given several times")
    parser.add_argument("--model", help="a folder (default: the job's own, or scripts/get_smollm2.py's)")
    parser.add_argument("--data", help="GSM8K's train.jsonl, for --job gsm8k")
    parser.add_argument("--side", choices=SIDES, help="one side only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps a turn, the first one not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1 or options.steps < 2:
        parser.error("--repeats must be at least 1 and --steps at least 2: the first step is not counted")
    if options.data and (options.job != ["gsm8k"] or not options.model):
        parser.error("--data is for --job gsm8k alone, with a --model")
    with tempfile.TemporaryDirectory() as models:
        for name in options.job or ["cpu-37"]:
            job = replace(JOBS[name], data=options.data)
            trl = options.side == "trl" or (options.side is None and "trl" in job.sides)
            model = options.model or model_of(job, Path(models), trl=trl)
            if model is not None and not Path(model).is_dir():
                parser.error(f"no model folder at {model}: run scripts/get_smollm2.py, or give --model")
            run(Work(name, job, model, options.steps, options.device), options)


def model_of(job: Job, folder: Path, *, trl: bool) -> str | None:
    """SmolLM2's folder, or that of a random model; None for one that is made in memory.

    TRL makes its frozen copy from a folder; under LoRA, and without TRL, none is written.
    """
    if job.shape is None:
        return str(default_folder())
    if job.lora or not trl:
        return None
    target = folder / hashlib.sha256(repr((sorted(job.shape.items()), job.weights)).encode()).hexdigest()[:16]
    if not target.exists():
        save_random_llama(target, WORDS, job.shape, dtype=job.weights)
    return str(target)


def run(work: Work, options: argparse.Namespace) -> None:
    """One turn in this process, or all turns and their table."""
    if options.here:
        import torch

        torch.set_num_threads(options.threads)
        random_model.made_of.update(words=WORDS, shape=work.job.shape, dtype=work.job.weights)
        print(json.dumps(summarise(SIDES[options.side](work))))
        return
    sides = [options.side] if options.side else work.job.sides
    if "trl" in sides:
        check_trl()
    show(work, take_turns(sides, options.repeats, lambda side: measure_apart(side, work, options.threads)))


def show(work: Work, turns: dict[str, list[dict[str, float]]]) -> None:
    """A table for a person, then one line of JSON."""
    job, line = work.job, dict[str, Any](job=work.name, device=work.device, steps=work.steps)
    results = {
        side: {key: statistics.median(turn[key] for turn in taken) for key in taken[0]} for side, taken in turns.items()
    }
    if job.data is None and len({r["tokens"] for r in results.values()}) > 1:
        raise SystemExit(f"bench/step.py: the sides had {[r['tokens'] for r in results.values()]} tokens to compute")
    columns = (*PHASES, "rest", "total", "first", "second", "start")
    print(f"{work.name}: {job.prompts} prompts of {_span(job.prompt)} × {job.group} of {_span(job.completion)} tokens")
    print(f"{'':>14}" + "".join(f"{column:>11}" for column in (*columns, "tokens/s", "µs/token", "peak GiB")))
    for side, r in results.items():
        label = f"trl {TRL_VERSION}" if side == "trl" else side
        figures = "".join(f"{r[column]:10.2f}s" for column in columns)
        print(f"{label:>14}{figures}{1e6 / r['token_us']:11.0f}{r['token_us']:11.1f}{r['peak_gib']:11.2f}")
        line |= {f"{side}_{key}": round(value, 3) for key, value in r.items()}
    if "trl" in turns:
        line["trl_version"] = TRL_VERSION
    if len(turns) == 2:
        one, other = turns.values()
        for key, label in (("total", "ratio"), ("update", "update_ratio")):
            line[label] = round(statistics.median(b[key] / a[key] for a, b in zip(one, other, strict=True)), 3)
    print(json.dumps(line), flush=True)


def _span(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


if __name__ == "__main__":
    main()
