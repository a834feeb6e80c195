"""Faults and healthy runs for `bench/doctor.py`: operators that break one property each of random healthy subjects."""
