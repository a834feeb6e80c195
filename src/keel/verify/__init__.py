"""Proofs by exact enumeration, and the audit of a user's own KL formula."""

from keel.verify.audit import audit
from keel.verify.check import Check
from keel.verify.formula import load_callable, parse_formula
from keel.verify.sections import SECTIONS, run

__all__ = ["SECTIONS", "Check", "audit", "load_callable", "parse_formula", "run"]
