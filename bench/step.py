"""One full GRPO step, Keel against TRL: rollout, reference, update, on the same model, prompts, lengths and hardware.

    python bench/step.py --job cpu-37              # 2 prompts of 37 tokens × 8 completions × 32 tokens, β 0.04
    python bench/step.py --job cpu-512             # the same with prompts of 512 tokens
    python bench/step.py --job long-prompt         # 1 prompt of 2,300 tokens × 8 × 128 tokens, a random Llama of 19M
    python bench/step.py --job long-prompt --device cuda
    python bench/step.py --job cpu-37 --side keel  # one side only

The sides take turns, `--repeats` of them, so that a machine whose speed changes changes both. A turn is a process of
its own, so that its peak memory is its own: one warm-up step, then one that counts. Reported are medians over the
turns, and as `ratio` the median of TRL's time over Keel's in the same turn. Weights and AdamW are fp32 on both sides,
completions are forced to full length, and neither recomputes activations (TRL's default gradient checkpointing is
switched off, in TRL's favour). Keel's side is the engine room's step (engine, reference, scoring, loss, optimizer)
without the loop of `keel train` around it: no tasks, judge, records or checkpoints. On a GPU peak memory is the
allocator's, and TF32 is off on both sides. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from get_smollm2 import default_folder

BETA, LEARNING_RATE = 0.04, 1e-6
TRL_VERSION = "1.16.0"  # the wrapped methods are private: another version may time something else


@dataclass(frozen=True)
class Job:
    """What one step has to do."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    random_model: bool = False  # bench/random_model.py's, unless --model names another

    @property
    def tokens(self) -> int:
        return self.prompts * self.group * self.new_tokens


JOBS = {
    "tiny": Job(2, 4, 12, 8),
    "cpu-37": Job(2, 8, 37, 32),
    "cpu-512": Job(2, 8, 512, 32),
    "long-prompt": Job(1, 8, 2300, 128, random_model=True),
}
WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "thing",
    "life",
    "world",
    "school",
    "state",
    "family",
    "group",
    "country",
)


def make_prompts(tokenizer: Any, job: Job) -> list[str]:
    """Texts of exactly `prompt_tokens` tokens, each different, and stable when encoded again."""
    prompts = []
    for number in range(job.prompts):
        words = [WORDS[(number * 7 + 3 * i) % len(WORDS)] for i in range(4 * job.prompt_tokens)]
        ids = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"][: job.prompt_tokens]
        text = tokenizer.decode(ids)
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) != job.prompt_tokens:
            raise SystemExit(f"bench/step.py: this tokenizer does not cut cleanly at {job.prompt_tokens} tokens")
        prompts.append(text)
    return prompts


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


def checksum_reward(completions: list[Any], **_: Any) -> list[float]:
    """Any reward that differs within a group and is the same in every process: the time does not depend on it."""
    return [float(zlib.crc32(str(completion).encode()) % 7) for completion in completions]


def check_trl() -> None:
    """Refuse to compare with a TRL other than the one whose phases were read."""
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != TRL_VERSION:
        raise SystemExit(
            f"bench/step.py: TRL {TRL_VERSION} is compared with, {found} is installed: pip install trl=={TRL_VERSION}"
        )


def run_keel(model: str, job: Job, steps: int, device: str) -> list[dict[str, float]]:
    """Keel's step: shared prompts in the rollout, one row a group in the reference and in the update."""
    import torch

    from keel.base.types import Batch, Group, Problem
    from keel.kl import KLOptions
    from keel.losses import LossOptions, advantages, objective
    from keel.models.load import load_model
    from keel.models.logprobs import score_tokens
    from keel.models.pack import pack
    from keel.reference import build_reference
    from keel.rollout import NativeEngine, Request, SamplingParams

    loaded = load_model(model, dtype="float32", device=device)
    policy, tokenizer = loaded.model, loaded.tokenizer
    reference = build_reference("frozen", loaded)
    engine = NativeEngine(policy, tokenizer)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)
    prompts = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in make_prompts(tokenizer, job)]
    requests = [Request(str(number), prompt) for number, prompt in enumerate(prompts)]
    sampling = SamplingParams(max_completion_length=job.new_tokens, num_generations=job.group, ignore_eos=True)
    clock = Clock(device)

    def rollout(step: int) -> list[Group]:
        answers = engine.generate(requests, sampling, seed=0, step=step)
        return [
            Group(Problem(request.key, ""), request.tokens, tuple(completions))
            for request, completions in zip(requests, answers, strict=True)
        ]

    def refer(packed: Any) -> Any:
        with reference.model() as held, torch.no_grad():
            return score_tokens(held, packed).logp

    def update(packed: Any, ref_logp: Any, groups: list[Group]) -> None:
        texts = [completion.text for group in groups for completion in group.completions]
        rewards = torch.tensor(checksum_reward(texts), device=device)
        advantage = advantages(rewards, packed.group)
        scores = score_tokens(policy, packed, entropy=True)
        batch = Batch(packed.action_mask, advantage, ref_logp=ref_logp)
        optimizer.zero_grad()
        objective(scores, batch, LossOptions(loss_type="grpo"), KLOptions(), BETA).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    results = []
    for step in range(steps):
        started = clock.now()
        groups = clock.timed("rollout", rollout)(step)
        packed = pack(groups, loaded.pad_id, shared_prefix=loaded.shared_prefix).to(loaded.device)
        ref_logp = clock.timed("reference", refer)(packed)
        clock.timed("update", update)(packed, ref_logp, groups)
        results.append({**clock.take(), "total": clock.now() - started})
    return results


def run_trl(model: str, job: Job, steps: int, device: str) -> list[dict[str, float]]:
    """TRL's GRPOTrainer on the same job; its phases are timed by wrapping its own methods."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    clock, results = Clock(device), []
    last = [0.0]

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.take()
            last[0] = clock.now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            phases = clock.take()
            total = clock.now() - last[0]
            update = total - phases.get("rollout", 0.0) - phases.get("reference", 0.0)
            results.append({**phases, "update": update, "total": total})

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job.prompts * job.group,
            num_generations=job.group,
            max_completion_length=job.new_tokens,
            generation_kwargs={"min_new_tokens": job.new_tokens},
            beta=BETA,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=steps,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=device == "cpu",
            tf32=None if device == "cpu" else False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=checksum_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": make_prompts(tokenizer, job) * steps}),
            processing_class=tokenizer,
            callbacks=[StepTimer()],
        )
        trainer._generate_single_turn = clock.timed("rollout", trainer._generate_single_turn)
        score = trainer._get_per_token_logps_and_entropies

        def score_timed(*args: Any, **kwargs: Any) -> Any:
            return (score if torch.is_grad_enabled() else clock.timed("reference", score))(*args, **kwargs)

        trainer._get_per_token_logps_and_entropies = score_timed
        # no_grad around generation and scoring is TRL's own; a step begins before its batch is generated
        trainer.train()
    return results


SIDES: dict[str, Callable[[str, Job, int, str], list[dict[str, float]]]] = {"keel": run_keel, "trl": run_trl}


def measure_here(side: str, model: str, job: Job, device: str) -> dict[str, float]:
    """One turn of a side in this process: the phases of the step after the warm-up."""
    _, step = SIDES[side](model, job, 2, device)
    return {**dict.fromkeys(("rollout", "reference", "update"), 0.0), **step, "peak_gib": peak_gib(device)}


def measure_apart(side: str, options: argparse.Namespace) -> dict[str, float]:
    """One turn of a side in a fresh process: the JSON on its last line."""
    command = [sys.executable, __file__, "--job", options.job, "--model", options.model, "--side", side]
    command += ["--threads", str(options.threads), "--device", options.device, "--here"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench/step.py: the {side} side failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def take_turns(sides: list[str], options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """`--repeats` turns of each side, alternating, and every other round in the opposite order."""
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(options.repeats):
        for side in sides if number % 2 == 0 else reversed(sides):
            turns[side].append(measure_apart(side, options))
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=sorted(JOBS), default="cpu-37")
    parser.add_argument("--model", help="a folder (default: the job's own, or scripts/get_smollm2.py's)")
    parser.add_argument("--side", choices=["both", *SIDES], default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    job = JOBS[options.job]
    with tempfile.TemporaryDirectory() as place:
        if options.model is None and job.random_model:
            from random_model import save_random_llama

            save_random_llama(Path(place), WORDS)
            options.model = place
        options.model = options.model or str(default_folder())
        if not Path(options.model).is_dir():
            parser.error(f"no model folder at {options.model}: run scripts/get_smollm2.py, or give --model")
        run(options, job)


def run(options: argparse.Namespace, job: Job) -> None:
    """One turn in this process, or all turns and their table."""
    if options.here:
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(measure_here(options.side, options.model, job, options.device)))
        return
    sides = list(SIDES) if options.side == "both" else [options.side]
    if "trl" in sides:
        check_trl()
    show(options.job, options.device, job, take_turns(sides, options))


def show(name: str, device: str, job: Job, turns: dict[str, list[dict[str, float]]]) -> None:
    """A table for a person, then one line of JSON."""
    results = {
        side: {key: statistics.median(turn[key] for turn in taken) for key in taken[0]} for side, taken in turns.items()
    }
    print(f"{name}: {job.prompts} prompts of {job.prompt_tokens} × {job.group} completions × {job.new_tokens} tokens")
    print(f"{'':>10} {'rollout':>9} {'reference':>10} {'update':>9} {'step':>9} {'tokens/s':>9} {'peak GiB':>9}")
    for side, r in results.items():
        label = f"trl {TRL_VERSION}" if side == "trl" else side
        phases = f"{r['rollout']:8.2f}s {r['reference']:9.2f}s {r['update']:8.2f}s {r['total']:8.2f}s"
        print(f"{label:>10} {phases} {job.tokens / r['total']:9.1f} {r['peak_gib']:9.2f}")
    line: dict[str, Any] = {"job": name, "device": device}
    for side, r in results.items():
        line |= {f"{side}_s": round(r["total"], 3), f"{side}_peak_gib": round(r["peak_gib"], 3)}
    if "trl" in turns:
        line["trl_version"] = TRL_VERSION
    if len(turns) == 2:
        pairs = zip(turns["trl"], turns["keel"], strict=True)
        line["ratio"] = round(statistics.median(trl["total"] / keel["total"] for trl, keel in pairs), 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
