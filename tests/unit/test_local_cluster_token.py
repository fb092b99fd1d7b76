"""The token of a local Ray cluster: whose it is, for how long, and which other processes find it."""

import json
import os
import stat

import pytest
import ray
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

from raypar.actors import local_cluster_token as tokens
from raypar.actors import ray_connection
from raypar.errors import ClusterError, ConfigError
from raypar.ray_compat import authentication
from raypar.ray_compat.settings import find_token


def test_the_users_token_is_taken_where_ray_looks_for_it_else_a_random_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    first, second = tokens.choose_token({}), tokens.choose_token({})
    assert len(first) == 64 and first != second and not list(tmp_path.iterdir()), "nothing is written"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of-the-home\n")
    (tmp_path / "named").write_text("of-the-path\n")
    path = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "named")}
    assert tokens.choose_token({"RAY_AUTH_MODE": "disabled"}) == "of-the-home"
    assert tokens.choose_token(path) == "of-the-path"
    assert tokens.choose_token({**path, "RAY_AUTH_TOKEN": "of-the-variable"}) == "of-the-variable"
    with pytest.raises(ConfigError, match=r"the token cannot be read from .*none: No such file") as found:
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
    assert "RAY_AUTH_TOKEN_PATH names another file" in found.value.cure
    with pytest.raises(ConfigError, match="characters that no header can"):
        find_token({"RAY_AUTH_TOKEN": "two\nlines"})


@pytest.mark.parametrize("before", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"}])
def test_rays_connections_show_the_token_in_the_block_and_what_was_set_before_comes_back(before, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    authentication.read_variables_again()
    mode = get_authentication_mode()
    with pytest.raises(ZeroDivisionError), authentication.token_authentication("of-the-run"):
        assert os.environ["RAY_AUTH_TOKEN"] == "of-the-run" and get_authentication_mode() == AuthenticationMode.TOKEN
        assert AuthenticationTokenLoader.instance().get_raw_token() == "of-the-run" and authentication.shows_token()
        raise ZeroDivisionError
    assert {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")} == {
        "RAY_AUTH_MODE": before.get("RAY_AUTH_MODE"),
        "RAY_AUTH_TOKEN": before.get("RAY_AUTH_TOKEN"),
    }
    assert get_authentication_mode() == mode
    if "RAY_AUTH_TOKEN" in before:
        assert AuthenticationTokenLoader.instance().get_raw_token() == "mine"
    monkeypatch.undo()
    authentication.read_variables_again()


def test_another_terminal_finds_the_token_by_the_clusters_raylet_and_by_no_other(tmp_path, monkeypatch):
    tokens.write_token_file(tmp_path, "127.0.0.1:7", "of-the-run")
    assert stat.S_IMODE((tmp_path / tokens.TOKEN_FILE).stat().st_mode) == 0o600
    options = {"node_id": "ab", "gcs-address": "127.0.0.1:7", "temp_dir": str(tmp_path / "r")}
    monkeypatch.setattr(tokens, "read_raylet_options", lambda pid: options if pid == os.getpid() else None)
    assert tokens.find_local_token("127.0.0.1:7") == "of-the-run"
    assert tokens.find_local_token("127.0.0.1:8") is None
    options["gcs-address"] = "127.0.0.1:8"  # says it is another's, whose file it is not
    assert tokens.find_local_token("127.0.0.1:8") is None
    (tmp_path / tokens.TOKEN_FILE).write_text(json.dumps({"address": "127.0.0.1:8", "token": 3}))
    assert tokens.find_local_token("127.0.0.1:8") is None
    (tmp_path / tokens.TOKEN_FILE).unlink()
    (tmp_path / tokens.TOKEN_FILE).symlink_to("/etc/passwd")
    assert tokens.find_local_token("127.0.0.1:8") is None


@pytest.mark.parametrize("shows, lets_in, told", [(False, True, True), (True, True, True), (True, False, False)])
def test_the_first_lines_say_where_a_joined_cluster_has_no_token(shows, lets_in, told, monkeypatch, tmp_path):
    monkeypatch.setattr(ray_connection, "check_address_answers", lambda address: None)
    monkeypatch.setattr(ray_connection, "shows_token", lambda: shows)
    monkeypatch.setattr(ray_connection, "control_store_lets_in_without_token", lambda address: lets_in)
    monkeypatch.setattr("raypar.actors.removed_working_dir.wait_until_working_dir_unpacked", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **given: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"gcs_address": "127.0.0.1:1"}))
    monkeypatch.setattr(ray_connection, "watch_control_store", lambda *given, **rest: tokens.contextlib.nullcontext())
    monkeypatch.setattr(ray_connection, "leave_cluster", lambda: None)
    with ray_connection.join_cluster("127.0.0.1:1", tmp_path) as connection:
        assert ("it has no token: whoever reaches its ports can run code" in connection.text) is told


def test_a_ray_that_would_listen_elsewhere_or_ask_for_no_token_is_not_used(monkeypatch):
    monkeypatch.setattr(ray_connection, "start_ray_with_retries", lambda start, stack: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"gcs_address": "192.0.2.2:7"}))
    with (
        pytest.raises(ClusterError, match=r"the local Ray cluster answers at 192\.0\.2\.2:7"),
        ray_connection.start_local_ray(1),
    ):
        pass


def test_a_local_cluster_keeps_no_records_and_shows_no_page_that_asks_for_no_token(monkeypatch, tmp_path):
    seen = {}

    def start(workers, nodes, gpus):
        seen.update(os.environ)
        raise ClusterError("enough", cure="none")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_connection, "start_local_ray", start)
    with pytest.raises(ClusterError, match="enough"), ray_connection.connect_ray(None, 1, tmp_path):
        pass
    assert seen["RAY_task_events_report_interval_ms"] == "0" and seen["RAY_enable_metrics_collection"] == "false"
    assert "RAY_task_events_report_interval_ms" not in os.environ
