"""Builds the layer graph of what the model function returned: a list of layers as it is, or a module that is traced and
split."""
