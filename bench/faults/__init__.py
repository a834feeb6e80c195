"""Faults and healthy runs for `bench/doctor.py`: operators that break one property each, over random healthy subjects."""
