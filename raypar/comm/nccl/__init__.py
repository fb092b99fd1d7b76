"""Moves tensors between the GPUs of one generation by NCCL, through CuPy."""
