"""The kinds of layers that can be cut, each with the named dimensions of its tensors, and which kind a module is."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import nn

from raypar.model.convolution_call import CONVOLUTIONS, is_transposed_convolution
from raypar.model.tensor_parallel.spatial_convolution import AXES
from raypar.model.transposed_linear import is_transposed_linear, linear_features
from raypar.plan.layer_dimensions import LayerDimensions, LayerKind

LINEAR = LayerKind("samples (in)", "samples (out)", (("weight", "(out) (in)"), ("bias", "(out)")))
TRANSPOSED_LINEAR = replace(LINEAR, parameters=(("weight", "(in) (out)"), ("bias", "(out)")))
CONVOLUTIONS_OF_DIMS = {
    dims: LayerKind(
        f"samples (groups in) {' '.join(names)}",
        f"samples (groups out) {' '.join(names)}",
        (("weight", "(groups out) (in) kernel"), ("bias", "(groups out)")),
        windows=names,
        sequence="whole",
    )
    for dims, names in AXES.items()
}
NORM = LayerKind("samples channels", "samples channels", (("weight", "channels"), ("bias", "channels")))
EMBEDDING = LayerKind("samples", "samples features", (("weight", "vocabulary features"),), looks_up=True)
ATTENTION = LayerKind(
    "samples (in)",
    "samples (out)",
    (
        ("in_proj_weight", "(parts heads width) (in)"),
        ("q_proj_weight", "(heads width) (in)"),
        ("k_proj_weight", "(heads width) key_features"),
        ("v_proj_weight", "(heads width) value_features"),
        ("in_proj_bias", "(parts heads width)"),
        ("out_proj.weight", "(out) (heads width)"),
        ("out_proj.bias", "(out)"),
    ),
    sequence="gathered",
)
EXPERTS = LayerKind(
    "samples (in)",
    "samples (out)",
    (("gate_up_proj", "experts (parts features) (in)"), ("down_proj", "experts (out) features")),
    sequence="refused",
)


def linear_dimensions(module: nn.Module) -> LayerDimensions:
    """Those of a linear layer, transposed or not."""
    read, made = linear_features(module)
    kind = TRANSPOSED_LINEAR if is_transposed_linear(module) else LINEAR
    return LayerDimensions(kind, (("in", read), ("out", made)), _parameters_of(module))


def convolution_dimensions(module: nn.Module) -> LayerDimensions:
    """Those of a convolution; `in` and `out` are channels of one group."""
    assert isinstance(module, CONVOLUTIONS)
    groups = module.groups
    sizes = {
        "groups": groups,
        "in": module.in_channels // groups,
        "out": module.out_channels // groups,
        "kernel": prod(module.kernel_size),
    }
    kind = CONVOLUTIONS_OF_DIMS[len(module.kernel_size)]
    if is_transposed_convolution(module):
        kind = replace(kind, parameters=(("weight", "(groups in) (out) kernel"), ("bias", "(groups out)")))
    return LayerDimensions(kind, tuple(sizes.items()), _parameters_of(module))


def embedding_dimensions(module: nn.Embedding) -> LayerDimensions:
    """Those of an embedding."""
    sizes = {"vocabulary": module.num_embeddings, "features": module.embedding_dim}
    return LayerDimensions(EMBEDDING, tuple(sizes.items()), _parameters_of(module))


def attention_dimensions(module: nn.MultiheadAttention) -> LayerDimensions:
    """Those of `nn.MultiheadAttention`, with its output layer."""
    sizes = {"parts": 3, "heads": module.num_heads, "width": module.head_dim, "in": module.embed_dim, "out": module.embed_dim}
    sizes |= {"key_features": module.kdim, "value_features": module.vdim}
    present = tuple(name for name, _ in module.named_parameters())
    return LayerDimensions(ATTENTION, tuple(sizes.items()), present)


def experts_dimensions(module: nn.Module) -> LayerDimensions:
    """Those of the experts of a mixture in one module."""
    experts, width, inner = module.get_parameter("down_proj").shape
    sizes = {"experts": experts, "parts": 2, "features": inner, "in": width, "out": width}
    return LayerDimensions(EXPERTS, tuple(sizes.items()), _parameters_of(module))


def dimensions_of(module: nn.Module) -> LayerDimensions:
    """Those of a linear layer, a convolution or an embedding."""
    if isinstance(module, CONVOLUTIONS):
        return convolution_dimensions(module)
    return embedding_dimensions(module) if isinstance(module, nn.Embedding) else linear_dimensions(module)


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(key for key, parameter in module._parameters.items() if parameter is not None)
