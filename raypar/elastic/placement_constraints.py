"""Which nodes may have a run's workers: what they must have, and which get no worker for a while. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
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


SUSPECT_S = 90.0
"""How long a node is suspected the first time. Ray, which places new workers, takes up to 65 s to notice that a node is dead
(five checks of 13 s each); until then it may place a worker there."""
MOST_SUSPECT_S = 1800.0
"""The longest suspicion. Each suspicion of a node lasts twice as long as its last one, so that a node with a bad network costs
fewer and fewer attempts."""


class SuspectNodes:
    """The nodes that are suspected at present. Each call takes the time as an argument.

    Every suspicion ends: otherwise no node would be left after the network of each machine has failed once.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        """Node -> when its latest suspicion ends or has ended."""
        self._lasts_s: dict[str, float] = {}
        """Node -> length of its latest suspicion."""

    def suspect(self, node: str, now_s: float) -> None:
        """Suspect a node from now on. If it is suspected already, its suspicion restarts with the same length."""
        if node not in self.at(now_s):
            self._lasts_s[node] = min(2 * self._lasts_s.get(node, SUSPECT_S / 2), MOST_SUSPECT_S)
        self._until_s[node] = now_s + self._lasts_s[node]

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are suspected at this time."""
        return frozenset(node for node, until_s in self._until_s.items() if now_s < until_s)


YOUNG_S = 120.0
"""The loss of a node of at most this age counts as a flap."""
LEAST_AGE_S = 30.0
"""The age that new nodes must reach after the second flap. Each further flap doubles it, up to `YOUNG_S`."""
CALM_S = 600.0
"""New nodes are trusted again after this time, plus the required age, without a flap."""


class FlappingNodes:
    """Keeps workers off new nodes while nodes flap, that is, join and are lost soon after.

    A node that joins again has a new id, and several nodes may share an address, so a flapping machine cannot be recognised.
    Instead every new node must reach an age first while any node flaps. Nodes of the first `see` do not count as new.
    """

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        """Node -> when it was first seen; -inf for those of the first `see`."""
        self._flaps = 0
        """Number of flaps since the last calm period."""
        self._last_s = -math.inf
        """Time of the last flap."""

    def see(self, nodes: Iterable[str], now_s: float) -> None:
        """Note the nodes that live now."""
        since_s = now_s if self._seen_s else -math.inf
        for node in nodes:
            self._seen_s.setdefault(node, since_s)

    def lose(self, node: str, now_s: float) -> float | None:
        """Note the loss of a node. Returns the age that new nodes must reach from now on.

        None if the loss is no flap, or is the first flap, which may be an accident.
        """
        age_s = now_s - self._seen_s.pop(node, -math.inf)
        if age_s > YOUNG_S:
            return None
        self._flaps = 1 if self._is_calm(now_s) else self._flaps + 1
        self._last_s = now_s
        return self._asked_age_s() or None

    def least_age_s(self, now_s: float) -> float:
        """The age that a new node must reach before a worker is started on it; 0 while nodes do not flap."""
        return 0.0 if self._is_calm(now_s) else self._asked_age_s()

    def at(self, now_s: float) -> frozenset[str]:
        """The nodes that are too young at this time."""
        least_s = self.least_age_s(now_s)
        return frozenset(node for node, seen_s in self._seen_s.items() if now_s - seen_s < least_s)

    def _asked_age_s(self) -> float:
        return float(min(LEAST_AGE_S * 2.0 ** min(self._flaps - 2, 10), YOUNG_S)) if self._flaps > 1 else 0.0

    def _is_calm(self, now_s: float) -> bool:
        return not self._flaps or now_s - self._last_s > self._asked_age_s() + CALM_S
