"""The metrics of a job: measured of each microbatch where the model's output is, and merged in the order of microbatches."""
