"""Batches on their way to a GPU: pinned, copied in a stream of their own, and waited for by the stream that computes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from raypar.worker.process import gpu_setup
from raypar.worker.process.gpu_setup import DeviceBatchSource

GPU = torch.device("cuda", 0)


class Field:
    """A tensor that writes down what is done with it."""

    _version = 0

    def __init__(self, did, name, *, layout=torch.strided, refuses=False):
        self.did, self.name, self.layout, self.refuses = did, name, layout, refuses

    def pin_memory(self):
        self.did.append(("pin", self.name))
        if self.refuses:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return Field(self.did, f"pinned {self.name}")

    def to(self, device, non_blocking=False):
        self.did.append(("copy", self.name, "beside the host" if non_blocking else "while the host waits", self.stream()))
        return Field(self.did, f"{self.name} on {device}")

    def record_stream(self, stream):
        self.did.append(("record", self.name, stream.name))

    def stream(self):
        return CURRENT[-1]


CURRENT = ["computing"]


@pytest.fixture
def did(monkeypatch):
    did = []

    @contextlib.contextmanager
    def inside(stream):
        CURRENT.append(stream.name)
        yield
        CURRENT.pop()

    computing = SimpleNamespace(name="computing", wait_stream=lambda other: did.append(("wait", other.name)))
    monkeypatch.setattr(gpu_setup.torch.cuda, "Stream", lambda device: SimpleNamespace(name="copying"))
    monkeypatch.setattr(gpu_setup.torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(gpu_setup.torch.cuda, "stream", inside)
    return did


def source_of(*fields):
    return SimpleNamespace(get=lambda step, microbatch: {field.name: field for field in fields})


def test_a_batch_is_pinned_copied_beside_the_host_and_waited_for_by_the_stream_that_computes(did):
    found = DeviceBatchSource(source_of(Field(did, "x"), Field(did, "y")), GPU).get(0, 0)
    assert list(found) == ["x", "y"]
    assert did == [
        ("pin", "x"),
        ("copy", "pinned x", "beside the host", "copying"),
        ("record", "pinned x on cuda:0", "computing"),
        ("pin", "y"),
        ("copy", "pinned y", "beside the host", "copying"),
        ("record", "pinned y on cuda:0", "computing"),
        ("wait", "copying"),
    ]


def test_where_memory_cannot_be_pinned_a_line_says_so_once_and_copies_go_on(did):
    lines = []
    source = DeviceBatchSource(source_of(Field(did, "x", refuses=True)), GPU, lines.extend)
    source.get(0, 0)
    source.get(0, 1)
    assert [what for what, *_ in did] == ["pin", "copy", "record", "wait", "copy", "record", "wait"]
    assert [line for _, line in lines] == [
        "no pinned memory (CUDA error: out of memory): the host waits while batches are copied to cuda:0"
    ]


def test_sparse_fields_are_copied_in_the_stream_that_computes(did):
    DeviceBatchSource(source_of(Field(did, "graph", layout=torch.sparse_csr)), GPU).get(0, 0)
    assert did == [("copy", "graph", "while the host waits", "computing"), ("wait", "copying")]


def test_on_other_devices_batches_are_plain_copies():
    fields = {"x": torch.ones(3)}
    found = DeviceBatchSource(SimpleNamespace(get=lambda step, microbatch: fields), torch.device("meta")).get(0, 0)
    assert found["x"].device.type == "meta"
