"""Faults and healthy runs for `bench/doctor.py`: operators break one property each of random healthy subjects."""
