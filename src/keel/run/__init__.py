"""From a configuration to a finished run directory: this room connects all others."""
