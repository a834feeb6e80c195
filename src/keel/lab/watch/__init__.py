"""`keel watch`: a live report of running runs on loopback."""

PORT = 5335  # KEEL on a phone keypad
