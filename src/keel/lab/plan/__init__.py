"""`keel train --plan`: memory and time of a step before anything runs."""
