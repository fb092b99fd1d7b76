"""Layers of LSTMs, GRUs and RNNs on shards by hidden units, written down in plain PyTorch in one process, forward and backward.

No raypar in here, and no autograd. Values lie [sequences, features], both directions one below the other; lists have an entry a
shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from helpers.same_shards import over_shards, run_of
from torch import Tensor, nn

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass
class Kept:
    """Of one layer: its input, and by time step, or by shard and time step, what its backward pass reads."""

    x: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    cells: list[list[Tensor]] = field(default_factory=list)
    gates: list[list[Tensor]] = field(default_factory=list)
    products: list[list[Tensor]] = field(default_factory=list)


class SameShardsRecurrent:
    """Layers of `module`, with one of 1 and 2 directions, on shards; states begin with zeros."""

    def __init__(self, module: nn.RNNBase, shards: int) -> None:
        self.module, self.kind, self.shards, self.units = module, type(module).__name__, shards, module.hidden_size
        self.gates, self.ways = GATES[self.kind], 2 if module.bidirectional else 1
        self.gradients: list[dict[str, Tensor]] = [{} for _ in range(shards)]

    def mine(self, shard: int) -> slice:
        return run_of(self.units, self.shards, shard)

    def part(self, name: str, shard: int) -> Tensor | None:
        """A shard's rows of each gate."""
        whole = self.module._parameters.get(name)
        if whole is None:
            return None
        by_gate = whole.detach().unflatten(0, (self.gates, self.units))
        return by_gate[:, self.mine(shard)].flatten(0, 1).clone(memory_format=torch.contiguous_format)

    def names(self, layer: int, way: int) -> list[str]:
        return [f"{kind}_l{layer}{'_reverse' * way}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def weights(self, layer: int, way: int, shard: int) -> list[Tensor | None]:
        return [self.part(name, shard) for name in self.names(layer, way)]

    def forward(self, x: Tensor) -> Tensor:
        """[time, sequences, features] -> the output."""
        self.kept: list[Kept] = []
        for layer in range(self.module.num_layers):
            x = self.layer_forward(layer, x)
        return x

    def by_iteration(self, values: Tensor, way: int) -> Tensor:
        """[time, sequences, n] -> [iterations, sequences, n]; the second direction begins at the end."""
        return values.flip(0) if way else values

    def layer_forward(self, layer: int, x: Tensor) -> Tensor:
        length, sequences, _ = x.shape
        kept = Kept(x)
        places = [slice(way * sequences, (way + 1) * sequences) for way in range(self.ways)]
        sums = []
        for shard in range(self.shards):
            both = []
            for way in range(self.ways):
                of_input, _, bias, bias_hidden = self.weights(layer, way, shard)
                if bias is not None and self.kind != "GRU":
                    bias = bias + bias_hidden
                rows = F.linear(x.reshape(length * sequences, -1), of_input, bias)
                both.append(self.by_iteration(rows.unflatten(0, (length, sequences)), way))
            sums.append(torch.cat(both, 1))
        hidden = x.new_zeros(self.ways * sequences, self.units)
        cells = [hidden[:, self.mine(shard)] for shard in range(self.shards)]
        for k in range(length):
            kept.hidden.append(hidden)
            kept.cells.append(cells)
            made = [self.step(layer, t, sums[t][k], hidden, cells[t], places) for t in range(self.shards)]
            hidden = torch.cat([each[0] for each in made], 1)
            cells = [each[1] for each in made]
            kept.gates.append([each[2] for each in made])
            kept.products.append([each[3] for each in made])
        kept.hidden.append(hidden)
        kept.cells.append(cells)
        self.kept.append(kept)
        outs = [self.by_time(torch.stack(kept.hidden[1:])[:, each], way) for way, each in enumerate(places)]
        return torch.cat(outs, 2)

    def by_time(self, values: Tensor, way: int) -> Tensor:
        """The opposite of `by_iteration`."""
        return values.flip(0) if way else values

    def step(self, layer, shard, given, hidden, cells, places):
        """(hidden units, cells, gates, what a GRU's r multiplies) of one shard."""
        products = []
        for way, here in enumerate(places):
            _, weight, _, bias = self.weights(layer, way, shard)
            if self.kind == "GRU":
                product = hidden[here].mm(weight.t()) if bias is None else torch.addmm(bias, hidden[here], weight.t())
            else:
                product = torch.addmm(given[here], hidden[here], weight.t())
            products.append(product)
        product, units = torch.cat(products), cells.shape[1]
        if self.kind == "RNN":
            made = torch.relu(product) if self.module.nonlinearity == "relu" else torch.tanh(product)
            return made, cells, [made], None
        if self.kind == "LSTM":
            both, g, o = product.split([2 * units, units, units], 1)
            both, g, o = both.sigmoid(), g.tanh(), o.sigmoid()
            i, f = both.chunk(2, 1)
            cells = torch.addcmul(f * cells, i, g)
            return o * cells.tanh(), cells, [i, f, g, o], None
        (both, n), (of_both, of_n) = (each.split([2 * units, units], 1) for each in (given.clone(), product))
        r, z = both.add_(of_both).sigmoid_().chunk(2, 1)
        of_n = of_n.contiguous()
        n.addcmul_(r, of_n).tanh_()
        return (hidden[:, self.mine(shard)] - n) * z + n, cells, [r, z, n], of_n

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, given that of the output; those of the slices are then in `gradients`."""
        for layer in reversed(range(self.module.num_layers)):
            gradient = self.layer_backward(layer, gradient)
        return gradient

    def layer_backward(self, layer: int, gradient: Tensor) -> Tensor:
        kept = self.kept[layer]
        length, sequences, _ = kept.x.shape
        places = [slice(way * sequences, (way + 1) * sequences) for way in range(self.ways)]
        by_way = gradient.unflatten(2, (self.ways, self.units)).unbind(2)
        of_out = torch.cat([self.by_iteration(each, way) for way, each in enumerate(by_way)], 1)
        carried = [torch.zeros_like(of_out[0][:, self.mine(shard)]) for shard in range(self.shards)]
        of_cells = [each.clone() for each in carried]
        of_gates: list[list[Tensor]] = [[] for _ in range(self.shards)]
        of_products: list[list[Tensor]] = [[] for _ in range(self.shards)]
        for k in reversed(range(length)):
            direct = []
            for shard in range(self.shards):
                mine = self.mine(shard)
                found = self.step_back(kept, k, shard, of_out[k][:, mine] + carried[shard], of_cells[shard])
                given, product, through, of_cells[shard] = found
                of_gates[shard].insert(0, given)
                of_products[shard].insert(0, product)
                direct.append(through)
            if k == 0:
                break
            sums = []
            for shard in range(self.shards):
                product = of_products[shard][0]
                sums.append(
                    torch.cat([product[here].mm(self.weights(layer, way, shard)[1]) for way, here in enumerate(places)])
                )
            total = over_shards(sums)
            carried = [total[:, self.mine(shard)] for shard in range(self.shards)]
            carried = [each if more is None else each + more for each, more in zip(carried, direct, strict=True)]
        inputs = []
        for shard in range(self.shards):
            total = None
            for way, here in enumerate(places):
                rows = self.by_time(torch.stack(of_gates[shard])[:, here], way).flatten(0, 1)
                product_rows = self.by_time(torch.stack(of_products[shard])[:, here], way).flatten(0, 1)
                before = self.by_time(torch.stack(kept.hidden[:-1])[:, here], way).flatten(0, 1)
                x = kept.x.reshape(length * sequences, -1)
                found = [rows.t().mm(x), product_rows.t().mm(before), rows.sum(0), product_rows.sum(0)]
                for name, each in zip(self.names(layer, way), found, strict=True):
                    if self.module._parameters.get(name) is not None:
                        self.gradients[shard][name] = each
                weight = self.weights(layer, way, shard)[0]
                total = rows.mm(weight) if total is None else torch.addmm(total, rows, weight)
            inputs.append(total)
        return over_shards(inputs).unflatten(0, (length, sequences))

    def step_back(self, kept, k, shard, gradient, of_cells):
        """Gradients of (the product with the input, that with the hidden state, hidden units before directly, cells before)."""
        gates = kept.gates[k][shard]
        if self.kind == "RNN":
            (h,) = gates
            slope = (h > 0).to(h.dtype) if self.module.nonlinearity == "relu" else 1 - h * h
            return slope * gradient, slope * gradient, None, of_cells
        if self.kind == "LSTM":
            i, f, g, o = gates
            top = torch.stack([cells[shard] for cells in kept.cells[1:]]).tanh()[k]
            of_cells = torch.addcmul(of_cells, gradient, (1 - top * top) * o)
            found = [
                (i - i * i) * g * of_cells,
                (f - f * f) * kept.cells[k][shard] * of_cells,
                (1 - g * g) * i * of_cells,
                (o - o * o) * top * gradient,
            ]
            return torch.cat(found, 1), torch.cat(found, 1), None, of_cells * f
        (r, z, n), of_n = gates, kept.products[k][shard]
        slope = (1 - z) * (1 - n * n)
        before = kept.hidden[k][:, self.mine(shard)]
        to_r, to_z = slope * of_n * (r - r * r) * gradient, (before - n) * (z - z * z) * gradient
        given = torch.cat([to_r, to_z, slope * gradient], 1)
        return given, torch.cat([to_r, to_z, slope * r * gradient], 1), gradient * z, of_cells
