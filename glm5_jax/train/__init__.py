"""Training: state, step, loop, checkpoints and metrics."""
