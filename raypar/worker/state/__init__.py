"""A worker's parameters and optimizer state: moved between workers, mirrored, copied for a checkpoint."""
