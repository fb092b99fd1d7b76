"""What one replica has of a parameter's gradient in a step: subtree sums, and then, in their memory, totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.comm.bucket_layout import Runs
from raypar.comm.buffer_pool import CPU, bytes_behind_alignment
from raypar.plan.addition_tree import TreeNode, addition_tree_children

SubtreeSums = Mapping[TreeNode, Sequence[Tensor | None] | Mapping[int, Tensor | None]]
"""Node of the addition tree -> parameter index -> sum of its gradients over the node's blocks; None: no gradient."""


def terms_of(rows: SubtreeSums, index: int, node: TreeNode) -> list[Tensor]:
    """The terms of a parameter's sum over a node: that sum, or one or both of its children's; none if it is undefined."""
    parts = (node,) if node in rows or node[1] - node[0] == 1 else addition_tree_children(node)
    return [term for part in parts if part in rows and (term := rows[part][index]) is not None]


class GradientSum:
    """The subtree sums of one parameter, and its total."""

    __slots__ = ("_flat", "has_memory", "is_defined", "runs", "shape", "terms", "total", "total_is_only_term", "unfilled")

    def __init__(self, shape: torch.Size, terms: list[list[Tensor]], buckets: int) -> None:
        self.shape = shape
        self.terms = terms
        """By subtree of this replica, until all buckets are filled: the terms of its sum (`terms_of`)."""
        self.is_defined = any(terms)
        """Whether this replica has a gradient."""
        self.unfilled = buckets
        """Buckets that have a part of the parameter and are not filled."""
        self.total: Tensor | None = None
        """[elements] The memory for the total, once a bucket is filled; None where this replica owns runs in other memory."""
        self.runs: list[tuple[int, int, Tensor]] = []
        """(first element, element behind the last, total) of each run that this replica owns, where replicas own runs."""
        self.has_memory = False
        """Whether it is known where the total will be."""
        self.total_is_only_term = False
        """Whether the total's memory has this replica's sum, which needs no further addition here."""
        self._flat: list[list[Tensor]] | None = None

    def flat_terms(self, subtree: int, start: int, stop: int) -> list[Tensor]:
        """The elements [start, stop) of the terms over one subtree."""
        if self._flat is None:
            self._flat = [[term.reshape(-1) for term in terms] for terms in self.terms]
        return [term[start:stop] for term in self._flat[subtree]]

    def find_memory(
        self, dtype: torch.dtype, own_runs: Runs | None, *, keep_others: bool = True, device: torch.device = CPU
    ) -> None:
        """Choose where the total will be: in the memory of the first term, of which a bucket has a copy before anything is
        written there; or in new memory. `own_runs`: the runs of which this replica gets totals; None: all. `keep_others`:
        whether the memory of the others' runs may stay with these."""
        self.has_memory = True
        first = next((term for terms in self.terms for term in terms if _is_free(term)), None)
        self.total_is_only_term = first is not None and sum(map(len, self.terms)) == 1
        if own_runs is None:
            self.total = torch.empty(self.shape.numel(), dtype=dtype, device=device) if first is None else first.view(-1)
            return
        for start, stop in own_runs:
            run = first.view(-1)[start:stop] if first is not None and (keep_others or stop - start == first.numel()) else None
            if run is None or bytes_behind_alignment(run):
                run = torch.empty(stop - start, dtype=dtype, device=device)
            self.runs.append((start, stop, run))

    @property
    def memory(self) -> list[Tensor]:
        """Where totals go."""
        return [run for _, _, run in self.runs] if self.total is None else [self.total]

    def place(self, start: int, stop: int) -> Tensor:
        """Where the total of some elements goes."""
        if self.total is not None:
            return self.total[start:stop]
        first, run = next((a, run) for a, b, run in self.runs if a <= start and stop <= b)
        return run[start - first : stop - first]

    def note_filled(self) -> None:
        """Note that one more bucket has what it needs; the terms are dropped after the last one."""
        self.unfilled -= 1
        if not self.unfilled:
            self.terms, self._flat = [], None

    def forget(self) -> None:
        """Let go of the totals, which somebody else has."""
        self.total, self.runs = None, []


def _is_free(term: Tensor) -> bool:
    """Whether a term's memory may hold the total: all of it is the term's, and the norm may be taken of it as it lies."""
    return term.is_contiguous() and not bytes_behind_alignment(term) and term.untyped_storage().nbytes() == term.nbytes
