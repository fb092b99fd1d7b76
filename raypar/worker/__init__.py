"""One worker's work: stages, training steps, state, checkpoints, checks before a run."""
