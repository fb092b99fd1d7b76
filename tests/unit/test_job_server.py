"""The client of Ray's job server: the addresses it tries, what it says where nothing answers, its deadlines, the token."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raypar.errors import ClusterAddressError, ClusterError, ConfigError
from raypar.launch import job_server
from raypar.launch.job_server import (
    JobServer,
    candidate_urls,
    connect_job_server,
    find_server_address,
    request_headers,
    without_password,
)

VERSION = {"ray_version": "2.60.0"}


@pytest.fixture
def server():
    """A server that answers as `answers[(method, path)]` says: (status, body), or a function of the handler."""
    answers: dict = {("GET", "/api/version"): (200, VERSION)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            given.append((self.command, self.path, dict(self.headers)))
            answer = answers.get((self.command, self.path), (404, "Job x does not exist"))
            if callable(answer):
                answer(self)
                return
            status, body = answer
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *given):
            pass

    given: list = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.answers, http.given, http.url = answers, given, f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def test_the_option_comes_before_the_environment():
    there = {"RAY_API_SERVER_ADDRESS": "http://a:8265", "RAY_ADDRESS": "http://b:8265"}
    assert find_server_address("http://c:1", there) == "http://c:1"
    assert find_server_address(None, there) == "http://a:8265"
    assert find_server_address(None, {"RAY_ADDRESS": "http://b:8265"}) == "http://b:8265"
    assert find_server_address(None, {"RAY_ADDRESS": "b:6379"}) is None, "the address of workers, for `raypar train`"
    assert find_server_address(None, {}) is None


@pytest.mark.parametrize(
    "address, urls",
    [
        ("http://head:8265", ["http://head:8265"]),
        ("https://head/ray/", ["https://head/ray"]),
        ("head", ["http://head:8265"]),
        ("head:8265", ["http://head:8265"]),
        ("head:6379", ["http://head:6379", "http://head:8265"]),
        ("ray://head:10001", ["http://head:8265"]),
        ("[::1]:6379", ["http://[::1]:6379", "http://[::1]:8265"]),
    ],
)
def test_addresses_that_are_tried(address, urls):
    assert candidate_urls(address) == urls


@pytest.mark.parametrize("address", ["auto", "local", "", "http://", "ftp://head", "head:port", "two words", "http://h:99999"])
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(ConfigError, match="http://HEAD:8265"):
        candidate_urls(address)


def test_an_address_where_nothing_answers_is_an_error_with_all_that_was_tried(monkeypatch):
    monkeypatch.setattr(job_server, "DASHBOARD_PORT", 2)
    with pytest.raises(ClusterAddressError) as error:
        connect_job_server("127.0.0.1:1", {})
    assert "tried http://127.0.0.1:1 (Connection refused), http://127.0.0.1:2 (Connection refused)" in error.value.what
    assert error.value.exit_code == 2 and "--address http://HEAD:8265" in error.value.cure
    with pytest.raises(ConfigError, match="RAY_API_SERVER_ADDRESS"):
        connect_job_server(None, {})


def test_another_server_is_not_taken_for_rays(server):
    for body in ("<html>", {"version": 1}, []):
        server.answers["GET", "/api/version"] = (200, body)
        with pytest.raises(ClusterAddressError, match="it is not Ray's job server"):
            connect_job_server(server.url, {})


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(server, monkeypatch):
    release = threading.Event()
    server.answers["GET", "/api/version"] = lambda handler: release.wait(5)
    monkeypatch.setattr(JobServer._get, "__kwdefaults__", {"method": "GET", "limit_s": 0.1})
    start = time.monotonic()
    with pytest.raises(ClusterAddressError, match="no answer within 0 s"):
        connect_job_server(server.url, {})
    assert time.monotonic() - start < 3
    release.set()


def test_an_answer_that_trickles_is_given_up_at_the_deadline(server):
    def trickle(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            for _ in range(40):
                handler.wfile.write(b" ")
                handler.wfile.flush()
                time.sleep(0.02)

    server.answers["GET", "/api/version"] = trickle
    with pytest.raises(ClusterError, match="no whole answer within"):
        JobServer(server.url)._get("/api/version", limit_s=0.2)


def test_the_token_is_found_as_ray_finds_it_and_is_in_no_message(tmp_path, server):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    assert request_headers({}) == {}
    bearer = {"Authorization": "Bearer s3cret"}
    assert request_headers({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}) == bearer
    assert request_headers({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}) == bearer
    with pytest.raises(ConfigError, match="token cannot be read"):
        request_headers({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="RAY_JOB_HEADERS"):
        request_headers({"RAY_JOB_HEADERS": "[1]"})
    connected = connect_job_server(server.url, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"})
    assert server.given[-1][2]["Authorization"] == "Bearer s3cret" and "s3cret" not in repr(connected)
    server.answers["GET", "/api/version"] = (401, "Unauthorized")
    with pytest.raises(ClusterAddressError, match="without its token") as error:
        connect_job_server(server.url, {})
    assert "RAY_AUTH_MODE=token" in error.value.cure
    with pytest.raises(
        ClusterAddressError, match=r"does not take this token \(HTTP 401\), which is in RAY_AUTH_TOKEN"
    ) as error:
        connect_job_server(server.url, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"})
    assert "ray get-auth-token" in error.value.cure and "s3cret" not in str(error.value)
    assert without_password("http://me:s3cret@head:8265/x") == "http://head:8265/x"


def test_a_redirect_is_not_followed_because_it_would_take_the_token_along(server):
    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", "http://elsewhere/api/version")
        handler.end_headers()

    server.answers["GET", "/api/version"] = redirect
    with pytest.raises(ClusterAddressError, match="redirects to http://elsewhere"):
        connect_job_server(server.url, {})


def test_an_unknown_job_and_a_failure_of_the_server(server):
    connected = JobServer(server.url)
    with pytest.raises(ConfigError, match="no such job"):
        connected.job("x")
    server.answers["GET", "/api/jobs/"] = (500, "Traceback\nValueError: no agent")
    with pytest.raises(ClusterError, match="HTTP 500 for /api/jobs/: ValueError: no agent"):
        connected.jobs()
    server.answers["GET", "/api/jobs/"] = (200, [{"submission_id": None, "type": "DRIVER"}, {"submission_id": "a"}, 3])
    assert connected.jobs() == [{"submission_id": "a"}]
    server.answers["POST", "/api/jobs/a%2Fb/stop"] = (200, {"stopped": True})
    assert connected.stop("a/b")
