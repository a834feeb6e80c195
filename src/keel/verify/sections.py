"""All proofs by section, in display order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keel.verify.gradients import gradients, sequence, sequence_facts
from keel.verify.losses import losses
from keel.verify.oracle import Check
from keel.verify.samples import filters, stale
from keel.verify.values import direction, gaussian, numerics, optimum, truncation

SECTIONS: dict[str, Callable[[], list[Check]]] = {
    "Gaussian example, N(0,1) against N(m,1), by quadrature": gaussian,
    "Direction and importance sampling on a sharp policy": direction,
    "Expected gradients, by enumeration over random distributions": gradients,
    "Sequence level: a 3-step, 4-token policy, all 64 sequences": sequence,
    "Sequence level: every row of the facts": sequence_facts,
    "Under every loss: completions of all lengths, half of them masked in the policy term": losses,
    "Stale samples: three policies, weights of tokens and of sequences, the measured KL": stale,
    "Filtered samples: the mass that top-p, top-k and min-p remove bounds the bias": filters,
    "Vocabulary truncation": truncation,
    "Numerics": numerics,
    "The KL-regularised optimum, and where descent with each estimator ends": optimum,
}


def run() -> Iterator[tuple[str, list[Check]]]:
    """Run all sections in order."""
    for title, section in SECTIONS.items():
        yield title, section()
