"""The generators of code that takes turns: each piece of code finds them as it left them.

Python's and NumPy's states are 5 kB, and to copy and set them takes longer than many a layer (150 us). So it is noted by which
number they were seeded: where nobody has drawn since, they are seeded again by it, and only if somebody else has moved them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from raypar.comm.blocking_code_as_routine import keep_all_generators
from raypar.worker.process.generator_positions import NUMPY
from raypar.worker.process.seed_generators import HostGenerators, make_torch_seeder, seed_python_and_numpy


class GeneratorsInTurn:
    """Seeds all generators for the code of one worker that takes turns, and keeps them for it meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._seed_torch = make_torch_seeder(device)
        self._on_gpu = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        self._host = HostGenerators.of_process()
        self._number: int | None = None
        """By what Python's and NumPy's generators were seeded last; None: by nobody here."""

    def seed(self, number: int) -> None:
        """Seed all generators."""
        self._seed_torch(number)
        if self._host is None:
            seed_python_and_numpy(number % 2**32)
        else:
            self._host.seed(number)
        self._number = number

    def keep(self) -> Callable[[], None]:
        """Returns what sets all generators back to their present states."""
        host, number = self._host, self._number
        if host is None or number is None or NUMPY.get_bit_generator() is not host.numpy_generator or not host.are_as_seeded():
            return keep_all_generators()
        on_cpu, on_gpu = torch.get_rng_state(), None if self._on_gpu is None else self._on_gpu.get_state()

        def restore() -> None:
            if self._number != number or not host.are_as_seeded():
                host.seed(number)
                self._number = number
            torch.set_rng_state(on_cpu)
            if self._on_gpu is not None and on_gpu is not None:
                self._on_gpu.set_state(on_gpu)

        return restore
