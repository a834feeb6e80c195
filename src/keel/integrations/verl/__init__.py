"""Keel inside verl: a trainer mode `keel_sync`, which verl's plugin loader registers; you import nothing.

The package stays light, because verl loads its plugins in every process: what needs verl is in `trainer` and `loss`.
"""
