"""Training: data, losses, the optimiser step and checkpoints of a run."""
