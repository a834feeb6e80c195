"""Training: the step, the loop around it, checkpoints, guards, the SFT warm start."""
