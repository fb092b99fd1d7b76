"""Optimizers that PyTorch lacks, as plain `torch.optim.Optimizer` classes: they need nothing of raypar and serve any script."""

from raypar.optimizers.adamw_8bit import AdamW8bit as AdamW8bit
from raypar.optimizers.lamb import LAMB as LAMB
from raypar.optimizers.lars import LARS as LARS
