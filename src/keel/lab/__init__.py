"""What looks at runs and never runs in a step."""
