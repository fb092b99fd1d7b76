"""The handshake by which two workers of one run prove that they belong to it. Pure: bytes in, bytes out, no socket or clock.

    dialer                                  acceptor
    HELLO      generation, ranks, nonce ->
                                        <-  CHALLENGE  nonce, proof
    PROOF      proof                    ->
                                        <-  ANSWER     welcome, or a refusal with its reason

A proof is an HMAC-SHA256, under the run's secret, of the prover's role, the whole HELLO, the acceptor's nonce and the run's
name. Therefore:

- The secret and the run's name are never sent, and both sides are authenticated.
- A proof is valid for one connection only, since both nonces are fresh, and the dialer's differs from the acceptor's.
- Every message but a refusal has a fixed size, so that no length is read from a peer before it has proven itself.

The ANSWER may take long: the acceptor sends it when it has been told of that generation.

Only the handshake is authenticated. What is sent afterwards is neither encrypted nor signed: keep everybody who could change
packets off the network between workers.
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
MAX_REASON_BYTES = 400
"""Longest reason of a refusal that is sent or read."""

HELLO = struct.Struct(f"<IIQIII{NONCE_BYTES}s")
"""magic, version, generation, rank of the dialer, rank that it dials, size, nonce."""
CHALLENGE = struct.Struct(f"<II{NONCE_BYTES}s{PROOF_BYTES}s")
"""magic, version, nonce, proof of the acceptor."""
ANSWER = struct.Struct("<IHH")
"""magic, 0 for welcome or 1 for refused, bytes of the reason; the reason follows."""

DIALER, ACCEPTOR = b"dialer  ", b"acceptor"


@dataclass(frozen=True)
class RunCredential:
    """A run's name and secret. Whoever has it may connect as any rank.

    The driver sends it to workers through Ray only. It is written nowhere, and `repr` leaves the secret out.
    """

    run: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_BYTES:
            raise CommError(
                f"the secret of run {self.run!r} has {len(self.secret)} bytes, {SECRET_BYTES} are needed",
                cure="make it with RunCredential.fresh",
            )

    @classmethod
    def fresh(cls, run: str) -> RunCredential:
        """A credential with a new secret."""
        return cls(run, os.urandom(SECRET_BYTES))

    def proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        """The HMAC that proves possession of this credential, for these messages of one connection."""
        # All parts but the last have fixed sizes, so that no two sets of parts are one text.
        return hmac.digest(self.secret, b"raypar" + role + hello + nonce + self.run.encode(), "sha256")

    def label(self, public: bytes) -> str:
        """A name made from `public`, which cannot be guessed without this credential."""
        return hmac.digest(self.secret, b"raypar-label" + public, "sha256")[:8].hex()


@dataclass(frozen=True, slots=True)
class RankClaim:
    """What a dialer claims in its HELLO: which rank of which generation it is, and which rank it dials."""

    generation: int
    rank: int
    dialed_rank: int
    """The rank that it dials."""
    size: int
    """Number of ranks in the generation."""


class AcceptorHandshake:
    """The acceptor's side of one handshake.

    Receive at most `wanted_bytes`, `feed` those that came, send what `feed` returns; repeat.
    """

    __slots__ = ("_asked", "_credential", "_data", "_hello", "_nonce", "claim", "wanted_bytes")

    def __init__(self, credential: RunCredential) -> None:
        self._credential = credential
        self._data = b""
        """Bytes of the message that is being received."""
        self._hello = self._nonce = b""
        """The dialer's HELLO and the nonce of the CHALLENGE, once the HELLO is complete."""
        self._asked: RankClaim | None = None
        """The claim of the HELLO, not proven yet."""
        self.claim: RankClaim | None = None
        """None until the dialer has proven itself."""
        self.wanted_bytes = HELLO.size
        """Bytes that are missing of the message that is being received."""

    @property
    def challenged(self) -> bool:
        """Whether a whole HELLO has come and was answered by a CHALLENGE."""
        return bool(self._hello)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wanted_bytes`; returns what to send. Raises `CommError` if the peer does not belong to the run."""
        self._data += data
        self.wanted_bytes -= len(data)
        if not self._hello:
            magic_and_version = self._data[:8]
            if magic_and_version != struct.pack("<II", MAGIC, VERSION)[: len(magic_and_version)]:
                raise CommError(f"a connection does not speak raypar version {VERSION}", cure="give workers ports of their own")
        if self.wanted_bytes:
            return b""
        if self._hello:
            if not hmac.compare_digest(self._data, self._credential.proof(DIALER, self._hello, self._nonce)):
                raise CommError(
                    f"a connection does not prove that it belongs to run {self._credential.run!r}",
                    cure="nothing is to be done: it was closed",
                )
            self.claim = self._asked
            return b""
        self._hello, self._data, self.wanted_bytes = self._data, b"", PROOF_BYTES
        _, _, generation, rank, to, size, _ = HELLO.unpack(self._hello)
        self._asked = RankClaim(generation, rank, to, size)
        self._nonce = os.urandom(NONCE_BYTES)
        return CHALLENGE.pack(MAGIC, VERSION, self._nonce, self._credential.proof(ACCEPTOR, self._hello, self._nonce))


class DialerHandshake:
    """The dialer's side of one handshake.

    Send `hello`; then receive at most `wanted_bytes`, `feed` those that came, send what `feed` returns; repeat.
    """

    __slots__ = ("_credential", "_data", "answer", "challenged", "hello", "wanted_bytes")

    def __init__(self, credential: RunCredential, claim: RankClaim) -> None:
        self._credential = credential
        nonce = os.urandom(NONCE_BYTES)
        self.hello = HELLO.pack(MAGIC, VERSION, claim.generation, claim.rank, claim.dialed_rank, claim.size, nonce)
        self._data = b""
        """Bytes of the message that is being received."""
        self.challenged = False
        """Whether the acceptor has proven itself."""
        self.answer: str | None = None
        """None until it is complete, "" for welcome, else the reason of the refusal."""
        self.wanted_bytes = CHALLENGE.size
        """Bytes that are missing of the current message. Never more, because the peer's first tensor may follow the ANSWER."""

    def feed(self, data: bytes) -> bytes:
        """Take up to `wanted_bytes`; returns what to send. Raises `CommError` if the peer does not belong to the run."""
        self._data += data
        self.wanted_bytes -= len(data)
        if self.wanted_bytes:
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
            self._data, self.wanted_bytes = b"", ANSWER.size
            return self._credential.proof(DIALER, self.hello, nonce)
        magic, refused, length = ANSWER.unpack_from(self._data)
        if magic != MAGIC or refused not in (0, 1) or (length > 0) != (refused == 1) or length > MAX_REASON_BYTES:
            raise CommError(
                f"its answer is damaged (code {refused}, {length} bytes)", cure="form the next generation without it"
            )
        self.wanted_bytes = ANSWER.size + length - len(self._data)
        if not self.wanted_bytes:
            self.answer = self._data[ANSWER.size :].decode(errors="replace")
        return b""


def pack_answer(refusal: str = "") -> bytes:
    """The bytes of an ANSWER: welcome, or a refusal with its reason, truncated to `MAX_REASON_BYTES`."""
    reason = refusal.encode()[:MAX_REASON_BYTES]
    return ANSWER.pack(MAGIC, 1 if reason else 0, len(reason)) + reason
