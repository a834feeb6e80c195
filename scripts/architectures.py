"""Judge every causal architecture that transformers has and write what was found to docs/architectures.md.

python scripts/architectures.py            # all of them, some minutes; the page is written anew
python scripts/architectures.py llama phi3+longrope   # these alone: printed, nothing is written
"""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.architectures import Variant, build, variants  # noqa: E402
from models.sweep import Outcome, judge, page  # noqa: E402


def judged(variant: Variant) -> tuple[Variant, Outcome]:
    """One architecture at the lengths of its own seed."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    return variant, judge(build(variant))


def main(asked: list[str]) -> None:
    known = {str(variant): variant for variant in variants()}
    wanted = [known[name] for name in asked] or list(known.values())
    outcomes: dict[Variant, Outcome] = {}
    with ProcessPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        for variant, outcome in pool.map(judged, wanted):
            print(f"{variant}: {outcome.scoring}, {outcome.sampling}, {outcome.error:.1e}; {outcome.note}", flush=True)
            outcomes[variant] = outcome
    if not asked:
        (ROOT / "docs" / "architectures.md").write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
