"""How tensors move between workers: the transport protocol, its implementations, and the reduction of gradients."""
