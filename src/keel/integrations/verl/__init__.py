"""Keel inside verl: a trainer mode `keel_sync`, which verl's plugin loader registers; you import nothing.

verl loads its plugins in every process, so only `trainer` and `loss` import verl.
"""
