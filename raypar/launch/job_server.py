"""Ray's job server over HTTP (its REST API), with a deadline for every answer. Needs no Ray on this machine.

Addresses are tried in the order of `candidate_urls`; an error says which were tried and what each answered.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.errors import ClusterAddressError, ClusterError, ConfigError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.ray_compat.settings import DEFAULT_FILE, find_token, token_file

DASHBOARD_PORT = 8265
"""Port on which the job server answers where `ray start` was given no other."""
ANSWER_S = 10.0
"""How long the job server may take for one answer."""
LOG_S = 60.0
"""How long it may take to send a job's log."""
ANSWER_BYTES = 256 << 20
"""Size limit of one answer, such as a log."""
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
"""Environment variable with the job server's address; `ray job` reads the same one."""
ONE_JOB = "/api/jobs/"
"""How the paths of requests about one job begin. The server of `connect_job_server` is Ray's: a 404 there is a job that it does
not know."""
FORM = "http://HEAD:8265, where Ray's dashboard answers"
"""What an address looks like, for messages."""


class NoSuchJob(ConfigError):
    """The job server does not know the job."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead the token to another host."""

    def redirect_request(self, *given: Any) -> None:
        """No new request."""


def find_server_address(option: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address given by `--address`, else by `RAY_API_SERVER_ADDRESS`, else by `RAY_ADDRESS` if that is a URL; else None."""
    if option is not None:
        return option
    address = environ.get(ADDRESS_VARIABLE)
    if not address and "://" in environ.get("RAY_ADDRESS", ""):
        address = environ["RAY_ADDRESS"]
    return address or None


def candidate_urls(address: str) -> list[str]:
    """The URLs at which the job server of the cluster at `address` may answer, in the order to try them.

    `http://host:port` is that URL only; `host:port` may be the job server's own or the control store's, and
    `ray://host:port` is the Ray client's: then the dashboard's usual port on the same host is tried too. Raises `ConfigError`.
    """
    scheme, there, rest = address.strip().rpartition("://")
    parts = urllib.parse.urlsplit(f"//{rest}" if there else f"//{address.strip()}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or any(c.isspace() for c in rest) or scheme not in ("", "http", "https", "ray") or address in ("auto", "local"):
        raise ConfigError(f"address {address!r} names no job server", cure=f"give --address {FORM}")
    if scheme in ("http", "https"):
        return [f"{scheme}://{rest.rstrip('/')}"]
    name = f"[{host}]" if ":" in host else host
    usual = f"http://{name}:{DASHBOARD_PORT}"
    if scheme == "ray" or port in (None, DASHBOARD_PORT):
        return [usual]
    return [f"http://{name}:{port}", usual]


def request_headers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The headers of every request: `RAY_JOB_HEADERS` (as `ray job`), and the cluster's token if `RAY_AUTH_MODE=token`.

    The token is searched as Ray searches it: `RAY_AUTH_TOKEN`, the file `RAY_AUTH_TOKEN_PATH`, `~/.ray/auth_token`. Raises
    `ConfigError`.
    """
    headers: dict[str, str] = {}
    if given := environ.get("RAY_JOB_HEADERS"):
        try:
            headers = {str(key): str(value) for key, value in json.loads(given).items()}
        except (ValueError, AttributeError):
            raise ConfigError("RAY_JOB_HEADERS is not a JSON object", cure='for example \'{"X-Team": "a"}\'') from None
    if environ.get("RAY_AUTH_MODE") != "token" or any(key.lower() == "authorization" for key in headers):
        return headers
    token = find_token(environ)
    if token is None:
        raise ConfigError(
            f"RAY_AUTH_MODE is token, and the token cannot be read from {token_file(environ)}",
            cure="put the cluster's token there, or into RAY_AUTH_TOKEN (RAY_AUTH_TOKEN_PATH names another file)",
        )
    return {**headers, "Authorization": f"Bearer {token}"}


def token_place(environ: Mapping[str, str]) -> str:
    """Where `request_headers` takes the token from, for messages: `in RAY_AUTH_TOKEN`. It need not be there."""
    if any(key.lower() == "authorization" for key in json.loads(environ.get("RAY_JOB_HEADERS") or "{}")):
        return "in RAY_JOB_HEADERS"
    if environ.get("RAY_AUTH_TOKEN"):
        return "in RAY_AUTH_TOKEN"
    return f"in {environ.get('RAY_AUTH_TOKEN_PATH') or DEFAULT_FILE}"


def without_password(url: str) -> str:
    """The URL without the user and password that it may hold, for messages."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def connect_job_server(address: str | None, environ: Mapping[str, str] = os.environ) -> JobServer:
    """The job server at `address`, which has answered. Raises `ClusterAddressError` with every URL that was tried."""
    if address is None:
        raise ConfigError(
            "no address of a job server is given",
            cure=f"give --address {FORM}, or set {ADDRESS_VARIABLE}; `raypar train` runs a job on this machine",
        )
    headers, tried = request_headers(environ), []
    for url in candidate_urls(address):
        server = JobServer(url, headers, token_place(environ))
        try:
            server.check_version()
        except ClusterAddressError:
            raise
        except ClusterError as error:
            tried.append(f"{without_password(url)} ({error.what})")
            continue
        return server
    raise ClusterAddressError(
        f"no job server answers at {without_password(address) if '@' in address else address}; tried {', '.join(tried)}",
        cure=f"give --address {FORM}; the head needs ray[default], and `--dashboard-host 0.0.0.0` if it is another machine",
    )


@dataclass(frozen=True)
class JobServer:
    """The job server of one cluster."""

    url: str
    """Its base URL, without a slash at the end."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request; may hold the token."""
    token_place: str = ""
    """Where the token was found (`token_place`), for messages."""

    @property
    def name(self) -> str:
        """The URL for messages."""
        return without_password(self.url)

    def check_version(self) -> str:
        """The version of Ray on the cluster. Raises `ClusterError` if nothing answers as Ray does."""
        answer = self._get("/api/version")
        if not isinstance(answer, dict) or "ray_version" not in answer:
            raise ClusterError("it is not Ray's job server")
        return str(answer["ray_version"])

    def jobs(self) -> list[dict[str, Json]]:
        """Ray's records of all submitted jobs."""
        answer = self._get("/api/jobs/")
        found = answer if isinstance(answer, list) else []
        return [job for job in found if isinstance(job, dict) and isinstance(job.get("submission_id"), str)]

    def job(self, submission_id: str) -> dict[str, Json]:
        """Ray's record of one job. Raises `NoSuchJob`."""
        answer = self._get(f"/api/jobs/{_quoted(submission_id)}")
        return answer if isinstance(answer, dict) else {}

    def log(self, submission_id: str) -> str:
        """All that the job has printed so far."""
        answer = self._get(f"/api/jobs/{_quoted(submission_id)}/logs", limit_s=LOG_S)
        return str(answer.get("logs") or "") if isinstance(answer, dict) else ""

    def stop(self, submission_id: str) -> bool:
        """Ask Ray to stop the job; returns whether it was running."""
        answer = self._get(f"/api/jobs/{_quoted(submission_id)}/stop", method="POST")
        return bool(answer.get("stopped")) if isinstance(answer, dict) else False

    def _get(self, path: str, *, method: str = "GET", limit_s: float = ANSWER_S) -> Any:
        """The JSON answer to a request. Raises `ClusterError`, `ClusterAddressError` for a wrong token, `NoSuchJob` for 404."""
        request = urllib.request.Request(self.url + path, method=method, headers=dict(self.headers))
        if method == "POST":
            request.data = b""
        until_s = time.monotonic() + limit_s
        try:
            with urllib.request.build_opener(_NoRedirect()).open(request, timeout=limit_s) as answer:
                content = b""
                while piece := answer.read1(1 << 20):
                    content += piece
                    if len(content) > ANSWER_BYTES or time.monotonic() > until_s:
                        raise ClusterError(f"{path} of {self.name}: no whole answer within {limit_s:.0f} s")
                return json.loads(content)
        except urllib.error.HTTPError as error:
            raise self._refusal(error, path) from None
        except TimeoutError:
            raise ClusterError(f"no answer within {limit_s:.0f} s") from None
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            raise ClusterError(f"no answer within {limit_s:.0f} s" if late else _reason(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(_no_http(error)) from None
        except ValueError:
            raise ClusterError("it is not Ray's job server: its answer is not JSON") from None

    def _refusal(self, error: urllib.error.HTTPError, path: str) -> Exception:
        """The error for an HTTP status that is not 200."""
        if error.code in (401, 403) and any(key.lower() == "authorization" for key in self.headers):
            return ClusterAddressError(
                f"the cluster at {self.name} does not take this token (HTTP {error.code}), which is {self.token_place}",
                cure="it is not the cluster's: `ray get-auth-token` prints the right one on the head",
            )
        if error.code in (401, 403):
            return ClusterAddressError(
                f"the cluster at {self.name} lets nobody in without its token (HTTP {error.code})",
                cure="set RAY_AUTH_MODE=token and give the cluster's token: RAY_AUTH_TOKEN, or a file (RAY_AUTH_TOKEN_PATH; "
                "~/.ray/auth_token where that is not set)",
            )
        try:
            text = error.read(2000).decode(errors="replace").strip()
        except OSError:
            text = ""
        if error.code == 404 and path.startswith(ONE_JOB):
            return NoSuchJob(f"no such job at {self.name}: {shorten(text)}")
        if 300 <= error.code < 400:
            return ClusterError(f"it redirects to {without_password(error.headers.get('Location', '?'))}: give that address")
        return ClusterError(f"HTTP {error.code} for {path}: {shorten(text.splitlines()[-1] if text else error.reason)}")


def _quoted(submission_id: str) -> str:
    """The id as a part of a path."""
    return urllib.parse.quote(submission_id, safe="")


def _no_http(error: Exception) -> str:
    """What to say of a server that is none for HTTP, without the bytes that it has sent, such as those of Ray's own port."""
    why = f" ({_reason(error)})" if isinstance(error, OSError) and error.strerror else ""
    return f"it does not speak HTTP{why}: this is not a job server's port, which is usually {DASHBOARD_PORT}"


def _reason(error: BaseException | str) -> str:
    """Why a connection failed, in words."""
    return shorten(getattr(error, "strerror", None) or str(error) or type(error).__name__)
