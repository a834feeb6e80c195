"""Proofs by exact enumeration, and audits of a user's own KL formula."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.verify.audit import audit
    from keel.verify.formula import load_callable, parse_formula
    from keel.verify.oracle import Check
    from keel.verify.sections import SECTIONS, run
else:
    __getattr__ = lazy_attributes(__name__, "audit formula oracle sections")

__all__ = ["SECTIONS", "Check", "audit", "load_callable", "parse_formula", "run"]
