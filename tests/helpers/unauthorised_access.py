"""Tries ports, Unix sockets and files without a token, as another user where this process may become one; prints what it got.

`python unauthorised_access.py JSON`: {"ports": [...], "sockets": [...], "files": [...], "token": ...}.
The token is for the counter-check.
"""

import contextlib
import encodings.idna  # noqa: F401 - at once: another user may not read the interpreter's folder
import json
import os
import re
import socket
import struct
import sys
from pathlib import Path

NOBODY = 65534
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
"""One of each service that Ray's processes offer."""
UNAUTHENTICATED = 16
PATIENCE_S = 1.5


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def header(name: str, value: str) -> bytes:
    """A header of HPACK: literal, not indexed, not compressed; a length of 127 and more takes two bytes."""

    def text(content: str) -> bytes:
        size = len(content)
        return (bytes([size]) if size < 127 else bytes([127, size - 127])) + content.encode()

    return b"\0" + text(name) + text(value)


def call(port: int, method: str, token: str | None = None) -> tuple[int | None, bytes]:
    """The gRPC status of a call with an empty message, and all bytes of the answer; None where there is no gRPC."""
    words = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "127.0.0.1", "te": "trailers"}
    words["content-type"] = "application/grpc"
    if token is not None:
        words["authorization"] = f"Bearer {token}"
    block = b"".join(header(*pair) for pair in words.items())
    asked = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as one:
        one.sendall(asked)
        while not (found := re.search(rb"grpc-status[\x01\x02](\d\d?)", answer)):
            if not (more := one.recv(4096)):
                break
            answer += more
            if b"\0\0" not in answer[:2]:  # no frame of HTTP/2
                break
        return (int(found[1]) if found else None), answer
    return None, answer


def http_status(port: int, path: str, token: str | None = None) -> int | None:
    """The status of a POST; None where there is no HTTP."""
    show = f"Authorization: Bearer {token}\r\n" if token else ""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as one:
        one.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\n{show}Content-Length: 0\r\n\r\n".encode())
        found = re.match(rb"HTTP/1.[01] (\d+)", one.recv(4096))
        return int(found[1]) if found else None
    return None


def try_access(given: dict) -> dict:
    """By port [gRPC statuses without the token, with it, HTTP statuses without it and with it]; what was read."""
    found: dict = {"ports": {}, "read": []}
    for port in given["ports"]:
        is_grpc = call(port, METHODS[0])[0] is not None
        statuses = [call(port, method)[0] for method in METHODS] if is_grpc else []
        right = [call(port, method, given["token"])[0] for method in METHODS] if is_grpc else []
        path = "/get_or_create_runtime_env"
        http = [] if is_grpc else [http_status(port, path), http_status(port, path, given["token"])]
        found["ports"][port] = [statuses, right, [status for status in http if status is not None]]
    for name in given["sockets"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
            one.settimeout(PATIENCE_S)
            one.connect("\0" + name[1:] if name.startswith("@") else name)
            one.sendall(b"x" * 64)
            if one.recv(64):
                found["read"].append(name)
    for name in given["files"]:
        with contextlib.suppress(PermissionError):
            found["read"].append([name, os.listdir(name) if Path(name).is_dir() else Path(name).read_bytes()[:8].hex()])
    return found


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    print(json.dumps(try_access(json.loads(sys.argv[1]))))
