"""A job that trains in milliseconds: 4 linear layers on 64 samples, with the faults that the end-to-end tests ask for."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import OrderedDict
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import nn

from examples import gpt
from raypar.callbacks import Callback, Stop

WIDTH = 8


class SlowToBuild(torch.optim.AdamW):
    """Takes so many seconds to be made as one of its parameters has for `build_s`: who holds the last layer builds slowly."""

    def __init__(self, parameters, **arguments) -> None:
        super().__init__(parameters, **arguments)
        self.build_s = max(getattr(p, "build_s", 0.0) for group in self.param_groups for p in group["params"])
        time.sleep(self.build_s)


class Count:
    """Counts calls where raypar does not look for state: a fault depends on the count, what is computed otherwise does not."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[None] = SimpleQueue()

    def __deepcopy__(self, memo: object) -> "Count":
        return Count()

    def __reduce__(self) -> tuple[type["Count"], tuple[()]]:
        return Count, ()

    def add(self) -> int:
        """One more; returns how many there are."""
        self.calls.put(None)
        return self.calls.qsize()


class Recorded(nn.Module):
    """Linear and tanh; `fault` happens in the forward pass of that step's first training microbatch (counted from 0).

    `flip`: from then on, on the first worker that can make the file, one weight is another one. `slow`: from then on, the first
    worker that can make the file sleeps three times as long as the others. `slow_while`: as long as this file is there, every
    microbatch takes 0.3 s more. `half_speed`: the process whose number is in this file sleeps twice as long.
    """

    def __init__(
        self,
        fault: str = "",
        at: int = 0,
        sleep_s: float = 0.0,
        flip: str = "",
        slow: str = "",
        slow_while: str = "",
        half_speed: str = "",
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fault, self.at, self.sleep_s, self.flip, self.count = fault, at, sleep_s, flip, Count()
        self.slow, self.slow_while, self.half_speed = slow, slow_while, half_speed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta:
            calls = self.count.add()
            if self.slow and calls == self.at + 1:
                with contextlib.suppress(FileExistsError), open(self.slow, "x") as file:
                    file.write(str(os.getpid()))
                self.sleep_s *= 3 if Path(self.slow).read_text() == str(os.getpid()) else 1
            if self.half_speed and Path(self.half_speed).exists() and Path(self.half_speed).read_text() == str(os.getpid()):
                time.sleep(self.sleep_s)
            time.sleep(self.sleep_s + 0.3 * bool(self.slow_while and Path(self.slow_while).exists()))
            if calls == self.at + 1:
                if self.flip:
                    with contextlib.suppress(FileExistsError):
                        os.close(os.open(self.flip, os.O_CREAT | os.O_EXCL))
                        self.linear.weight.data.view(torch.int32)[0, 0] ^= 1 << 20
                if self.fault == "raise":
                    raise ZeroDivisionError("the fault that was asked for")
                if self.fault == "memory":
                    raise MemoryError("what was asked for")
                if self.fault in ("exit", "ctrl-c"):
                    ends(how=self.fault)
                if self.fault == "leak":
                    found = torch.tanh(self.linear(x))
                    torch.set_grad_enabled(False)
                    os.chdir("/")
                    return found
                if self.fault == "die":
                    os._exit(3)
                if self.fault == "nan":
                    return torch.tanh(self.linear(x)) * float("nan")
        return torch.tanh(self.linear(x))


def model(
    depth: int = 4,
    fault: str = "",
    at: int = 0,
    sleep_s: float = 0.0,
    width: int = WIDTH,
    flip: str = "",
    slow: str = "",
    slow_while: str = "",
    half_speed: str = "",
    build_s: float = 0.0,
) -> nn.Sequential:
    """`fault`, `sleep_s`, `build_s` (`SlowToBuild`) are the last layer's; a `width` other than the samples' does not fit."""
    layers = [
        (f"layer{i}", Recorded(*((fault, at, sleep_s, flip, slow, slow_while, half_speed) if i == depth - 1 else ())))
        for i in range(depth)
    ]
    if build_s:
        layers[-1][1].linear.weight.build_s = build_s
    if width != WIDTH:
        layers[0] = ("layer0", nn.Linear(width, WIDTH))
    return nn.Sequential(OrderedDict(layers))


def ends(*given: object, how: str = "exit") -> None:
    """As a model, a loss, a data set or a callback: what is no `Exception`."""
    if how == "exit":
        sys.exit(3)
    if how in ("cancelled", "own"):
        raise (asyncio.CancelledError if how == "cancelled" else BaseException)("by a library")
    if how == "unspoken":
        os._exit(3)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyboardInterrupt


def raises() -> nn.Module:
    raise KeyError("no such model")


def wide_kernel() -> nn.Sequential:
    """One convolution, whose rows read 6 rows above and below them."""
    return nn.Sequential(nn.Conv2d(1, 3, 13, padding=6))


def tied(**size: int) -> nn.Sequential:
    """The example GPT, the output layer's weight being the embedding's."""
    parts = gpt.layers(**size)
    parts.head.logits.weight = parts.embed.token.weight
    return parts


class Samples:
    """Sample i: (x [WIDTH], y [WIDTH])."""

    raypar_thread_safe = True

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(2, size, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class SlowOnce(Samples):
    """Sample 21 takes `seconds` to read, once: after the first epoch, on the first worker that can make the file.

    `hold`: no other thread of the process runs meanwhile.
    """

    def __init__(self, size: int, file: str, seconds: float, hold: bool = False) -> None:
        super().__init__(size)
        self.file, self.seconds, self.hold, self.reads = file, seconds, hold, 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if index == 21 and self.reads > len(self):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
                if self.hold:  # `PyDLL` does not release the interpreter's lock
                    ctypes.PyDLL(None).sleep(int(self.seconds))
                else:
                    time.sleep(self.seconds)
        return super().__getitem__(index)


class HungryOnce(Samples):
    """Sample 21 takes `gigabytes` of memory and keeps them, once: after the first epoch, on the first worker that can make the
    file."""

    def __init__(self, size: int, file: str, gigabytes: float) -> None:
        super().__init__(size)
        self.file, self.gigabytes, self.reads, self.kept = file, gigabytes, 0, []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if index == 21 and self.reads > len(self):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
                self.kept.append(b"x" * int(self.gigabytes * 2**30))
                time.sleep(30)  # Ray's monitor looks now and then
        return super().__getitem__(index)


def data(
    size: int = 64, slow: str = "", slow_s: float = 25.0, hold: bool = False, hungry: str = "", gigabytes: float = 3.0
) -> Samples:
    if hungry:
        return HungryOnce(size, hungry, gigabytes)
    return SlowOnce(size, slow, slow_s, hold) if slow else Samples(size)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean(1)


def picky_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fits by shape; raises when it sees numbers."""
    if not output.is_meta:
        raise ArithmeticError("not these numbers")
    return loss(output, target)


class Diary(Callback):
    """Writes a line per hook into `path`; asks to stop after `stop_after` steps; takes `start_s` seconds to begin."""

    def __init__(self, path: str, stop_after: int = 0, start_s: float = 0.0) -> None:
        self.path, self.stop_after, self.start_s = path, stop_after, start_s

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")

    def on_start(self, info):
        time.sleep(self.start_s)
        self.note(f"start {info.first}")

    def on_step(self, info):
        self.note(f"step {info.step}")
        return Stop("enough") if info.step == self.stop_after else {"twice": 2 * info.loss}

    def on_validation(self, info):
        self.note(f"validation {info.step}")

    def on_checkpoint(self, info):
        self.note(f"checkpoint {info.step}")

    def on_end(self, info):
        self.note(f"end {info.end} {info.step}")


HEAVY = {
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "numpy",
    "cupy",
    "ray.train",
}
"""Modules that take long to load."""


def note_modules(folder: str, name: str) -> None:
    """Write the names of those of `HEAVY` that this process has loaded into a file `name` of its own."""
    (Path(folder) / f"{name}-{os.getpid()}").write_text(" ".join(sorted(HEAVY & set(sys.modules))))


def noting_schedule(step: int, folder: str) -> float:
    """A learning-rate schedule that notes what its process has loaded by then."""
    note_modules(folder, f"step{step}")
    return 1.0


JOB = """
name: tiny
seed: 3
steps: 12
batch_size: 8
microbatches: 4
model: {function: helpers.tiny_job:model, args: {}}
loss: helpers.tiny_job:loss
data: {function: helpers.tiny_job:data, args: {}}
validation: {function: helpers.tiny_job:data, args: {size: 8}, every: 6}
optimizer: {function: torch.optim:AdamW, args: {lr: 1.0e-2}}
clip_norm: 1.0
plan: {stages: 2, replicas: 2}
checkpoint: {every: 4}
"""


def write_job(folder: Path) -> Path:
    """The job file, with its run folder under `folder`."""
    path = folder / "tiny.yaml"
    path.write_text(JOB + f"run_dir: {folder / 'runs'}\n")
    return path
