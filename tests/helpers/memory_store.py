"""A storage for checkpoints that raypar does not have, in this process's memory: what another storage has to be."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from raypar.errors import CheckpointError

URL = "memory://bucket/run/checkpoints"


@dataclass(frozen=True)
class MemoryFile:
    """An `OpenedFile`: the content that it had when it was opened."""

    content: bytes
    stream: io.BytesIO

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def version(self) -> int:
        return hash(self.content)

    def read_at(self, memory: memoryview, offset: int) -> int:
        part = self.content[offset : offset + len(memory)]
        memory[: len(part)] = part
        return len(part)


@dataclass
class MemoryStore:
    """Objects by key, as an object store has them; nothing is renamed. Checkpoints are there once their last file is."""

    at: str
    objects: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """(checkpoint, file) -> content."""
    committed: dict[str, str] = field(default_factory=dict)
    """Name of a checkpoint -> the name under which its files are."""
    begun: int = 0
    """Number of checkpoints ever begun."""

    def checkpoint_location(self, name: str, file: str = "") -> str:
        return "/".join([self.at, name, *([file] if file else [])])

    def absolute_location(self, name: str) -> str:
        return self.checkpoint_location(name)

    def names(self) -> list[str]:
        return list(self.committed)

    def begin(self, name: str) -> str:
        self.begun += 1
        return f"begun-{self.begun}-{name}"

    def file_name(self, begun: str, file: str) -> str:
        return file

    @contextlib.contextmanager
    def write(self, name: str, file: str) -> Iterator[io.BytesIO]:
        written = io.BytesIO()
        yield written
        self.objects[self._key(name, file)] = written.getvalue()

    def commit(self, begun: str, name: str, last_file: str, content: bytes) -> None:
        self.objects[begun, last_file] = content
        former, self.committed[name] = self.committed.get(name), begun
        self.remove(former or "")

    def _key(self, name: str, file: str) -> tuple[str, str]:
        return self.committed.get(name, name), file

    def has_file(self, name: str, file: str) -> bool:
        return self._key(name, file) in self.objects

    def read(self, name: str, file: str, *, limit: int, cure: str) -> bytes:
        with self.open(name, file, cure=cure) as opened:
            if opened.nbytes > limit:
                raise CheckpointError(f"{self.checkpoint_location(name, file)} has {opened.nbytes:,} bytes", cure=cure)
            return opened.content

    @contextlib.contextmanager
    def open(self, name: str, file: str, *, cure: str) -> Iterator[MemoryFile]:
        if not self.has_file(name, file):
            raise CheckpointError(f"cannot read {self.checkpoint_location(name, file)}: there is no such object", cure=cure)
        content = self.objects[self._key(name, file)]
        yield MemoryFile(content, io.BytesIO(content))

    def remove(self, name: str) -> None:
        name = self.committed.pop(name, name)
        for key in [key for key in self.objects if key[0] == name]:
            del self.objects[key]

    def leftovers(self) -> list[tuple[str, str]]:
        there = {name for name, _ in self.objects} - {*self.committed.values()}
        return [(name, name.split("-", 2)[2]) for name in there]
