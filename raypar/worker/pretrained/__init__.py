"""The weights that a job begins with (`init_from`): files of any format, matched with the model's tensors by name."""
