"""The KL before any training that each defect of a scoring pass makes, on the answers of one trained chess model.

    python bench/chess_step0_kl.py runs/chess-good/checkpoints/step-3000

Policy and reference have the same weights, so that without a defect every figure is 0. Each line has one defect in one
of the two passes; the answers are sampled from the model as it is. Printed as a table: nats per token by k1, k3 (the
log-ratio held within ±20 nats) and exactly over the vocabulary, and the same summed over an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.envs.registry import build_task
from keel.kl import k3
from keel.models.load import load_model

CLAMP = 20.0  # nats, the default of `kl.log_ratio_clamp`
Pass = Callable[["Rows"], Tensor]


class Rows:
    """Answers with their prompts, padded on the right; `places` marks the logits that predict an answer's token."""

    def __init__(self, sequences: list[list[int]], prompts: list[int], pad: int) -> None:
        self.longest_prompt, self.prompts, self.pad = max(prompts), prompts, pad
        width = max(map(len, sequences))
        self.ids = torch.tensor([row + [pad] * (width - len(row)) for row in sequences])
        at = torch.arange(width - 1)
        lengths = torch.tensor([len(row) for row in sequences])[:, None]
        self.filled = at < lengths - 1
        self.places = (at >= torch.tensor(prompts)[:, None] - 1) & self.filled


class Defect(NamedTuple):
    """What is wrong, in whose pass, the two passes, and the tokens counted (None: the answers')."""

    what: str
    side: str
    policy: Pass
    reference: Pass
    where: Tensor | None = None


@torch.no_grad()
def sample(model: Any, prompt: list[int], count: int, longest: int, eos: set[int]) -> list[list[int]]:
    """Answers at temperature 1, each up to its end token."""
    rows, done = torch.tensor([prompt] * count), torch.zeros(count, dtype=torch.bool)
    out = [list(prompt) for _ in range(count)]
    for _ in range(longest):
        chosen = torch.multinomial(model(input_ids=rows).logits[:, -1].softmax(-1), 1)
        for row, token in enumerate(chosen[:, 0].tolist()):
            if not done[row]:
                out[row].append(token)
                done[row] = token in eos
        if done.all():
            break
        rows = torch.cat([rows, chosen], -1)
    return out


def plain(model: Any, temperature: float = 1.0) -> Pass:
    return lambda rows: (model(input_ids=rows.ids).logits[:, :-1] / temperature).log_softmax(-1)


def one_late(model: Any) -> Pass:
    """The logits of each token's own place, which predict the token behind it."""
    return lambda rows: model(input_ids=rows.ids).logits[:, 1:].log_softmax(-1)


def left_padded(model: Any, *, masked: bool) -> Pass:
    """Prompts padded on the left to one length, and positions counted from the padding."""

    def score(rows: Rows) -> Tensor:
        shifts = [rows.longest_prompt - prompt for prompt in rows.prompts]
        width = rows.ids.shape[1]
        out = []
        for row, shift in zip(rows.ids, shifts, strict=True):
            ids = torch.cat([torch.full((shift,), rows.pad), row])[None]
            seen = torch.ones_like(ids)
            seen[:, :shift] = 0 if masked else 1
            positions = torch.arange(shift + width)[None]
            logits = model(input_ids=ids, attention_mask=seen, position_ids=positions).logits
            out.append(logits[0, shift : shift + width - 1].log_softmax(-1))
        return torch.stack(out)

    return score


def blind(model: Any) -> Pass:
    """The mask of the loss as attention mask: an answer that cannot see its prompt."""

    def score(rows: Rows) -> Tensor:
        seen = torch.arange(rows.ids.shape[1]) >= torch.tensor(rows.prompts)[:, None]
        positions = torch.arange(rows.ids.shape[1]).expand_as(rows.ids)
        logits = model(input_ids=rows.ids, attention_mask=seen.long(), position_ids=positions).logits
        return logits[:, :-1].log_softmax(-1)

    return score


@torch.no_grad()
def figures(rows: Rows, policy: Pass, reference: Pass, where: Tensor) -> list[float]:
    """k1, k3 and exact per token, then the same summed over an answer and averaged over answers."""
    mine, theirs = policy(rows).double(), reference(rows).double()
    k1 = (mine - theirs).gather(-1, rows.ids[:, 1:, None])[..., 0]
    exact = (mine.exp() * (mine - theirs)).sum(-1)
    summed = [(value * where).sum() for value in (k1, k3((-k1).clamp(-CLAMP, CLAMP)), exact)]
    return [(s / where.sum()).item() for s in summed] + [(s / len(where)).item() for s in summed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--plies", type=int, default=0)
    parser.add_argument("--earlier", help="a checkpoint of the same model from before, as another reference")
    parser.add_argument("--shape", default="keel.recipes.chess.models:chess_gpt2_3x64", help="of the random weights")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    loaded = load_model(chosen.model, device="cpu", probe=False)
    model: Any = loaded.model
    task = build_task("chess_env", pieces=3, plies=[0, chosen.plies], history=1, illegal=0.0)
    problems = task.held_out(chosen.prompts, seed=0)
    prompts = [loaded.tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
    answers = [
        (row, len(prompt))
        for prompt in prompts
        for row in sample(model, prompt, chosen.samples, chosen.max_tokens, set(loaded.eos_ids))
    ]
    rows = Rows([row for row, _ in answers], [prompt for _, prompt in answers], loaded.pad_id)
    good, dropping = plain(model), plain(load_model(chosen.model, device="cpu", dropout=True, probe=False).model)
    fresh = plain(load_model(chosen.shape, device="cpu", seed=1, probe=False).model)
    late, hidden = one_late(model), blind(model)
    lines = [
        Defect("none", "", good, good),
        Defect("dropout", "policy", dropping, good),
        Defect("dropout, prompt tokens counted too", "policy", dropping, good, rows.filled),
        Defect("dropout", "reference", good, dropping),
        Defect("temperature 0.7 instead of 1", "reference", good, plain(model, 0.7)),
        Defect("left padding, positions not moved", "reference", good, left_padded(model, masked=True)),
        Defect("the same, and the padding is seen", "reference", good, left_padded(model, masked=False)),
        Defect("prompt hidden by the loss mask", "policy", hidden, good),
        Defect("prompt hidden by the loss mask", "reference", good, hidden),
        Defect("logits one place late", "policy", late, good),
        Defect("logits one place late", "reference", good, late),
        Defect("random weights", "reference", good, fresh),
    ]
    if chosen.earlier:
        early = plain(load_model(chosen.earlier, device="cpu", probe=False).model)
        lines.append(Defect("an earlier checkpoint", "reference", good, early))
    print(f"{len(answers)} answers, {rows.places.sum() / len(answers):.1f} tokens each")
    print("| defect | in the pass of | k1 | k3 | exact | k1, summed | k3, summed | exact, summed |\n|" + " --- |" * 8)
    for line in lines:
        where = rows.places if line.where is None else line.where
        measured = figures(rows, line.policy, line.reference, where)
        print(f"| {line.what} | {line.side} | " + " | ".join(f"{value:.3g}" for value in measured) + " |")


if __name__ == "__main__":
    main()
