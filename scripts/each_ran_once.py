"""Check that each collected test ran in exactly one phase and passed there.

    python scripts/each_ran_once.py COLLECTED PHASE.xml …

COLLECTED is what `pytest --collect-only -q` printed, the files of the phases are pytest's `--junitxml`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 20


def names_of(collected: str) -> list[str]:
    """The tests' names as JUnit files spell them, from lines such as `tests/kl/test_k3.py::test_it[0]`."""
    names = []
    for line in collected.splitlines():
        path, separator, test = line.partition(".py::")
        if separator:
            names.append(f"{path.replace('/', '.')}.{test.replace('::', '.', test.partition('[')[0].count('::'))}")
    return names


def faults(collected: Iterable[str], reports: Iterable[str]) -> list[str]:
    """A line for each test that did not run once, was skipped, or was run and not collected."""
    ran: Counter[str] = Counter()
    lines = []
    for report in reports:
        for case in ElementTree.fromstring(report).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            ran[name] += 1
            lines += [f"{name}: {child.tag}" for child in case if child.tag in ("skipped", "failure", "error")]
    expected = Counter(collected)
    for name in sorted(expected.keys() | ran.keys()):
        if name not in expected:
            lines.append(f"{name}: ran and was not collected")
        elif ran[name] != expected[name]:
            lines.append(f"{name}: ran {ran[name]} times")
    return lines


def main() -> int:
    collected, *reports = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])
    names = names_of(collected)
    lines = faults(names, reports) if names else ["no test was collected"]
    for line in lines[:SHOWN]:
        print(line)
    if len(lines) > SHOWN:
        print(f"and {len(lines) - SHOWN} more")
    print(f"{len(names)} tests collected, {len(lines)} faults")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
