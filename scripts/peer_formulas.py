"""Write docs/peer-formulas.md from what the installed TRL and verl compute: `make peers`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from keel.integrations.formulas import Peer, columns, peers
from keel.verify.peer_terms import PeerTermResult

PAGE = Path(__file__).resolve().parents[1] / "docs" / "peer-formulas.md"
PAGED = ("TRL", "verl")
HEAD = """# What the KL terms of TRL and verl compute

`keel verify --peers` calls the loss and KL functions of the trainers that are installed, one sampled token at a time,
for every token of small vocabularies. It says what a term's value estimates and what the expected gradient is that the
optimizer gets. `make peers` writes this page. Made on {date} with {versions}.

- **its value**: the mean over samples of the policy, against the exact KL.
- **its expected gradient**: samples of the policy itself, log-ratios to the reference of at most 2 nats. Where it is no
  divergence's, the smallest cosines to ∇KL(policy‖ref) and ∇KL(ref‖policy) follow.
- **log-ratios above 2 nats**: the same beyond 2 nats, where clamps act.
- **samples of older weights**: the sampler is up to 2 nats away from the policy, as after several updates of one batch.

A distribution over one token is enumerated, so terms for later tokens of a sequence are not judged here, nor are means
over batches. "The same" repeats the expected gradient. Two quantities are equal if they differ by less than 1e-5 of
their size. The default of a trainer is in bold.
"""
TAIL = """
TRL 1.16's GMPOTrainer does not read `use_bias_correction_kl`.

## Other trainers

OpenRLHF, AReaL, tinker-cookbook and prime-rl are judged where they are installed and can be imported. By hand on
2026-11-18:

| trainer | term | expected gradient |
| --- | --- | --- |
| AReaL 1.0.4 | distillation beside RL (`rl_loss_weight=1`, the default): k1 in the loss | zero |
| AReaL 1.0.4 | distillation alone (`rl_loss_weight=0`) | ∇KL(policy‖teacher), from older weights too |
| AReaL 1.0.4 | KL in the reward, `kl_estimator=k1` (default) | ∇KL(policy‖ref) |
| tinker-cookbook 0.6.1 | KL in the advantage (`kl_penalty_coef`) | ∇KL(policy‖ref) |
| OpenRLHF 0.11.2 | KL in the reward, k1 (default) | ∇KL(policy‖ref) |
| OpenRLHF 0.11.2 | KL in the loss, `unbiased_gradient` | ∇KL(policy‖ref), from older weights too |
| prime-rl 0.8.0 | distillation, loss type `ref_kl` | ∇KL(policy‖teacher) |

OpenRLHF imports flash_attn, which needs a GPU: its imports of flash_attn and deepspeed were replaced here. Of
prime-rl its module of losses alone was imported.

Not judged, because it is no function of its own: the KL in the reward of TRL's RLOOTrainer.
"""


def page(found: Iterable[Peer], day: date) -> str:
    found = list(found)
    versions = " and ".join(f"{peer.name} {peer.version}" for peer in found)
    return "\n".join([HEAD.format(date=day, versions=versions), *map(section, found)]) + TAIL


def section(peer: Peer) -> str:
    """The table of a peer."""
    rows = [(_term(row), row.options, columns(row)) for row in peer.rows]
    titles = ("term", "options", *rows[0][2])
    lines = [f"## {peer.name} {peer.version}\n", _line(titles), _line("---" for _ in titles)]
    lines += [_line((term, f"`{options}`", *texts.values())) for term, options, texts in rows]
    return "\n".join(lines) + "\n"


def _term(row: PeerTermResult) -> str:
    name = f"**{row.name}**" if row.default else row.name
    return f"{name}, `{row.file}:{row.line}`"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    found = [peer for peer in peers() if peer.name in PAGED]
    if missing := [f"{peer.name}: {peer.reason}" for peer in found if not peer.rows]:
        sys.exit("; ".join(missing))
    PAGE.write_text(page(found, date.today()))
    print(f"wrote {PAGE}")
