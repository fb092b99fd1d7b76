"""One pipeline stage: its layers, run forward and backward, a microbatch at a time."""
