"""Training: the step, the loop, checkpoints, the supervised start."""
