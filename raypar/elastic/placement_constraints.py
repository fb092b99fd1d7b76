"""Which nodes may have a run's workers: the labels and accelerators that they must have. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

NODE_LABEL = "ray.io/node-id"
"""Ray's label with the id of a node."""
ZONE_LABEL = "ray.io/availability-zone"
"""Ray's label with the zone of a cloud's node."""
MARKET_LABEL = "ray.io/market-type"
"""Ray's label that tells spot from on-demand nodes."""
ON_DEMAND = {MARKET_LABEL: "on-demand"}
"""The labels of on-demand nodes where a job does not name others."""


@dataclass(frozen=True)
class PlacementConstraints:
    """The constraints of one run on the nodes of its workers."""

    gpus: int = 0
    """GPUs of each worker."""
    accelerator_type: str | None = None
    """Ray's name of the accelerator that nodes must have, such as `H100`; None: any node."""
    label_selector: Mapping[str, str] = field(default_factory=dict)
    """Label -> the value that nodes must have, in Ray's syntax: `spot`, `!spot`, `in(a,b)`, `!in(a,b)`."""
    on_demand: int = 0
    """Least number of workers on nodes that match `on_demand_label_selector`."""
    on_demand_label_selector: Mapping[str, str] = field(default_factory=lambda: dict(ON_DEMAND))
    """The labels of on-demand nodes, which the cloud does not take back."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, as a bundle of a placement group."""
        found: dict[str, float] = {"CPU": 1}
        if self.gpus:
            found["GPU"] = self.gpus
        if self.accelerator_type is not None:
            found[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return found

    def selector(self, on_demand: bool = False, avoid: Collection[str] = ()) -> dict[str, str]:
        """The label selector of one worker's bundle, which excludes the nodes `avoid`."""
        found = {**self.label_selector, **(self.on_demand_label_selector if on_demand else {})}
        if avoid:
            found[NODE_LABEL] = f"!in({','.join(sorted(avoid))})"
        return found

    def describe(self, workers: int = 1, on_demand: bool = False) -> str:
        """What workers that are placed together need, for messages: `2 x {CPU: 1, GPU: 1} with market=spot on one node`."""
        bundle = ", ".join(f"{kind}: {amount:g}" for kind, amount in self.bundle.items())
        labels = ", ".join(f"{label}={value}" for label, value in self.selector(on_demand).items())
        together = f"{workers} x " if workers > 1 else ""
        return f"{together}{{{bundle}}}" + (f" with {labels}" if labels else "") + " on one node" * (workers > 1)

    def fits_node(
        self, resources: Mapping[str, float], labels: Mapping[str, str], workers: int, on_demand: bool, already: int = 0
    ) -> bool:
        """Whether `workers` more workers fit on a node with these resources and labels, if nothing but this run used it.

        `already`: workers of this run on the node.
        """
        room = all(resources.get(kind, 0.0) >= (already + workers) * amount for kind, amount in self.bundle.items())
        return room and match_labels(labels, self.selector(on_demand))


def match_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels match a label selector in Ray's syntax."""
    return all(_match_value(labels.get(label), wanted) for label, wanted in selector.items())


def _match_value(value: str | None, wanted: str) -> bool:
    negated, wanted = wanted.startswith("!"), wanted.removeprefix("!")
    listed = re.fullmatch(r"in\((.*)\)", wanted)
    among = [one.strip() for one in listed[1].split(",")] if listed else [wanted]
    return (value in among) != negated


def is_label_selector(label: str, value: str) -> bool:
    """Whether Ray accepts this label and this value in a label selector."""
    word = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
    is_label = re.fullmatch(rf"(?:{word}(?:\.{word})*/)?{word}", label, re.ASCII)
    return bool(is_label and re.fullmatch(rf"!?(?:{word}|in\({word}(?:, ?{word})*\))", value, re.ASCII))
