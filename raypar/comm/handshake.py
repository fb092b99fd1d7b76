"""Who may take a rank's place: the handshake of two workers of one run. Bytes in, bytes out; knows no socket and no clock.

    dialer                                  acceptor
    HELLO      generation, ranks, nonce ->
                                        <-  CHALLENGE  nonce, proof
    PROOF      proof                    ->
                                        <-  ANSWER     welcome, or the reason of a refusal

A proof is an HMAC-SHA256, under the run's secret, of the prover's role, the whole HELLO, the acceptor's nonce and the run's
name. So the secret and the name never travel, each side proves itself to the other, a proof fits one connection only (both
nonces are fresh), and one side's proof cannot be given back as the other's. Every message but a refusal has one fixed size:
nothing that a stranger sends is a length. The ANSWER may take long: it comes when the acceptor is told of that generation.

The handshake decides who gets a connection. What travels on it afterwards is neither encrypted nor signed: whoever can change
packets on the network between workers has to be kept off that network.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass, field

from raypar.errors import CommError

MAGIC = 0x72617970  # "rayp"
VERSION = 2
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
REASON_MOST = 400
"""Bytes of the longest reason of a refusal that is sent, or read."""

HELLO = struct.Struct(f"<IIQIII{NONCE_BYTES}s")
"""magic, version, generation, rank of the dialer, rank that it dials, size, nonce."""
CHALLENGE = struct.Struct(f"<II{NONCE_BYTES}s{PROOF_BYTES}s")
"""magic, version, nonce, proof of the acceptor."""
ANSWER = struct.Struct("<IHH")
"""magic, 0 for welcome or 1 for refused, bytes of the reason; the reason follows."""

DIALER, ACCEPTOR = b"dialer  ", b"acceptor"


@dataclass(frozen=True)
class Credential:
    """A run's name with its secret. Whoever has it may take any rank's place; it is handed from driver to workers by Ray alone,
    and neither written anywhere nor shown (`repr` leaves it out)."""

    run: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_BYTES:
            raise CommError(
                f"the secret of run {self.run!r} has {len(self.secret)} bytes, {SECRET_BYTES} are needed",
                cure="make it with Credential.fresh",
            )

    @classmethod
    def fresh(cls, run: str) -> Credential:
        """A new secret."""
        return cls(run, os.urandom(SECRET_BYTES))

    def proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        """What only somebody with this credential can say about these messages. All parts but the last have fixed sizes."""
        return hmac.digest(self.secret, b"raypar" + role + hello + nonce + self.run.encode(), "sha256")

    def label(self, public: bytes) -> str:
        """A name that nobody without this credential can foresee."""
        return hmac.digest(self.secret, b"raypar-label" + public, "sha256")[:8].hex()


@dataclass(frozen=True, slots=True)
class Claim:
    """The place that a dialer asks for: rank `rank` of `size` in a generation, at rank `to`."""

    generation: int
    rank: int
    to: int
    size: int


class Acceptance:
    """The acceptor's side. Read exactly `wanted` bytes next, `feed` all that came, send what that returns.

    `claim` is what the dialer has asked for, once it has proven itself; before that nothing it says is believed.
    """

    __slots__ = ("_asked", "_credential", "_data", "_hello", "_nonce", "claim", "wanted")

    def __init__(self, credential: Credential) -> None:
        self._credential = credential
        self._data = b""
        self._hello = self._nonce = b""
        self._asked: Claim | None = None
        self.claim: Claim | None = None
        self.wanted = HELLO.size

    @property
    def challenged(self) -> bool:
        """Whether the dialer has said a whole HELLO."""
        return bool(self._hello)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wanted` bytes. Raises `CommError` when this is nobody of the run's."""
        self._data += data
        self.wanted -= len(data)
        if not self._hello:
            magic_and_version = self._data[:8]
            if magic_and_version != struct.pack("<II", MAGIC, VERSION)[: len(magic_and_version)]:
                raise CommError(f"a connection does not speak raypar version {VERSION}", cure="give workers ports of their own")
        if self.wanted:
            return b""
        if self._hello:
            if not hmac.compare_digest(self._data, self._credential.proof(DIALER, self._hello, self._nonce)):
                raise CommError(
                    f"a connection does not prove that it belongs to run {self._credential.run!r}",
                    cure="nothing is to be done: it was closed",
                )
            self.claim = self._asked
            return b""
        self._hello, self._data, self.wanted = self._data, b"", PROOF_BYTES
        _, _, generation, rank, to, size, _ = HELLO.unpack(self._hello)
        self._asked = Claim(generation, rank, to, size)
        self._nonce = os.urandom(NONCE_BYTES)
        return CHALLENGE.pack(MAGIC, VERSION, self._nonce, self._credential.proof(ACCEPTOR, self._hello, self._nonce))


class Dial:
    """The dialer's side: send `hello`, then read exactly `wanted` bytes next, `feed` them, send what that returns.

    `answer`: None until it is complete, "" for welcome, else the reason of the refusal. Never wants a byte behind the answer:
    the peer's first message may stand there.
    """

    __slots__ = ("_credential", "_data", "answer", "challenged", "hello", "wanted")

    def __init__(self, credential: Credential, claim: Claim) -> None:
        self._credential = credential
        nonce = os.urandom(NONCE_BYTES)
        self.hello = HELLO.pack(MAGIC, VERSION, claim.generation, claim.rank, claim.to, claim.size, nonce)
        self._data = b""
        self.challenged = False
        """The acceptor has proven itself."""
        self.answer: str | None = None
        self.wanted = CHALLENGE.size

    def feed(self, data: bytes) -> bytes:
        """Take up to `wanted` bytes. Raises `CommError` when this is nobody of the run's."""
        self._data += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        if not self.challenged:
            magic, version, nonce, proof = CHALLENGE.unpack(self._data)
            right = self._credential.proof(ACCEPTOR, self.hello, nonce)
            if magic != MAGIC or version != VERSION or not hmac.compare_digest(proof, right):
                raise CommError(
                    f"it does not prove that it belongs to run {self._credential.run!r}",
                    cure="another program has the port of a worker that has died; form the next generation without it",
                )
            self.challenged = True
            self._data, self.wanted = b"", ANSWER.size
            return self._credential.proof(DIALER, self.hello, nonce)
        magic, refused, length = ANSWER.unpack_from(self._data)
        if magic != MAGIC or refused not in (0, 1) or (length > 0) != (refused == 1) or length > REASON_MOST:
            raise CommError(
                f"its answer is damaged (code {refused}, {length} bytes)", cure="form the next generation without it"
            )
        self.wanted = ANSWER.size + length - len(self._data)
        if not self.wanted:
            self.answer = self._data[ANSWER.size :].decode(errors="replace")
        return b""


def pack_answer(refusal: str = "") -> bytes:
    """Welcome, or the reason of a refusal, cut where it is too long."""
    reason = refusal.encode()[:REASON_MOST]
    return ANSWER.pack(MAGIC, 1 if reason else 0, len(reason)) + reason
