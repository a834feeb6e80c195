"""From a configuration to a finished run directory: the one place that puts the rooms together."""
