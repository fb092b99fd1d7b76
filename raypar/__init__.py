"""raypar: train PyTorch models on a Ray cluster that grows, shrinks and fails, with the bits of one process."""

__version__ = "0.1.0"
