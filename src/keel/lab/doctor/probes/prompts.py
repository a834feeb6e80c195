"""Prompts: no token twice at their head, other problems at every step, and none of those that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.render import Renderer


def prompt_findings(setup: ProbeSetup) -> list[Finding]:
    """BOS at most once at the head of a prompt; a problem that is held out is not trained on."""
    findings = []
    bos = getattr(setup.policy.tokenizer, "bos_token_id", None)
    doubled = [group for group in setup.groups if bos is not None and group.prompt_tokens[:2] == (bos, bos)]
    if doubled:
        findings.append(
            finding(
                "prompt/double-bos",
                f"{len(doubled)} of {len(setup.groups)} prompts begin with the BOS token twice",
                "the chat template writes BOS and the tokenizer or the task adds another",
                "take BOS out of the task's prompt or out of the chat template (data.chat_template)",
            )
        )
    findings += _repeats(setup)
    task, seed = setup.run.task, setup.config.run.seed
    trained = {str(p.prompt) for step in range(4) for p in task.sample(32, seed=seed, step=step)}
    shared = [problem for problem in task.held_out(32) if str(problem.prompt) in trained]
    if shared:
        findings.append(
            finding(
                "eval/leak",
                f"{len(shared)} of 32 held-out problems turn up in the first 128 training problems, such as "
                f"{shared[0].key!r}",
                "task.sample returns problems that task.held_out keeps for evaluation",
                "keep the two apart, as keel.envs.Task asks",
            )
        )
    return findings


def _repeats(setup: ProbeSetup) -> Iterator[Finding]:
    """Steps must ask other problems than the steps before them."""
    count, seed = setup.config.rollout.prompts_per_step, setup.config.run.seed
    steps = [[str(p.prompt) for p in setup.run.task.sample(count, seed=seed, step=step)] for step in range(3)]
    distinct = {prompt for prompts in steps for prompt in prompts}
    if len(distinct) > 1 and len({frozenset(prompts) for prompts in steps}) > 1:
        return
    same = "one problem" if len(distinct) == 1 else f"the same {len(distinct)} problems"
    yield finding(
        "task/repeats",
        f"steps 0, 1 and 2 ask {same} ({count} prompts a step), such as {steps[0][0]!r}",
        "task.sample ignores its step, or the task has no more problems than one step asks for",
        "draw problems by seed and step, as keel.envs.Task asks, or give the task more of them",
    )


def rendered(setup: ProbeSetup, problems: Sequence[Any]) -> list[tuple[int, ...]]:
    """The tokens of prompts as training renders them."""
    data = setup.config.data
    renderer = Renderer(setup.policy.tokenizer, chat_template=data.chat_template, system_prompt=data.system_prompt)
    return [renderer.prompt(problem) for problem in problems]
