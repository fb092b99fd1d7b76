"""Which token this process shows in Ray's connections, and whether a cluster asks for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from raypar.errors import ClusterError
from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED
from raypar.ray_compat.auth_token import TOKEN_VARIABLE
from raypar.ray_compat.settings import temporary_environment_variables

ANSWER_S = 5.0
"""How long the control store may take to answer `lets_in_without_token`."""
MODE_VARIABLE = "RAY_AUTH_MODE"
"""The variable that says whether Ray's processes ask for a token. `disabled` is not obeyed by local clusters."""


def _look_for_tokens() -> Any:
    import ray._raylet as raylet

    assert callable(raylet.Config.initialize) and callable(raylet.AuthenticationTokenLoader.instance().reset_cache)
    return raylet


TOKENS: Fence[Any] = Fence(
    api="ray._raylet.AuthenticationTokenLoader",
    reason="Ray reads the token's variables once in a process, and has no public API to have them read again",
    versions=TESTED,
    feature="choosing the token of Ray's connections",
    without="a local Ray cluster, which other users of this machine could enter, is not started; set RAY_AUTH_MODE and "
    "RAY_AUTH_TOKEN before this process starts to join a cluster",
    probe=_look_for_tokens,
)


def _look_for_mode() -> Any:
    from ray._raylet import AuthenticationMode, get_authentication_mode

    disabled = AuthenticationMode.DISABLED
    return lambda: bool(get_authentication_mode() != disabled)


MODE: Fence[Any] = Fence(
    api="ray._raylet.get_authentication_mode",
    reason="no public API says whether this process shows a token",
    versions=TESTED,
    feature="knowing whether a cluster asks for a token",
    without="the run's first lines say that it has none",
    probe=_look_for_mode,
)


@contextlib.contextmanager
def token_authentication(token: str) -> Iterator[None]:
    """Have this process, and those that it starts in the body, show and ask for `token` in all of Ray's connections.

    Ray reads both variables once: it is told to read them again, at the end too, so that the user's own `ray.init` finds this
    process as it was. Raises `ClusterError` for a Ray in which that is not possible.
    """
    try:
        with temporary_environment_variables({MODE_VARIABLE: "token", TOKEN_VARIABLE: token}):
            read_variables_again()
            yield
    finally:
        with contextlib.suppress(ClusterError):
            read_variables_again()


def read_variables_again() -> None:
    """Have Ray forget the authentication mode and the token that it has read. Raises `ClusterError` where that cannot be."""
    with TOKENS.required() as raylet:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def shows_token() -> bool:
    """Whether this process shows its token in Ray's connections, and asks others for it."""
    return MODE.use(lambda shows: bool(shows()), False)


def _look_for_addresses() -> Any:
    from ray._private import services
    from ray._raylet import GcsClient

    assert callable(services.canonicalize_bootstrap_address) and callable(GcsClient)
    return services


OPEN_CLUSTER: Fence[Any] = Fence(
    api="ray._private.services.canonicalize_bootstrap_address",
    reason="whether a cluster lets everybody in is only seen by asking it without joining it",
    versions=TESTED,
    feature="seeing whether a cluster lets in processes without a token",
    without="the run's first lines do not warn of one that does",
    probe=_look_for_addresses,
)


def lets_in_without_token(address: str) -> bool:
    """Whether the control store at `address` (`host:port` or `auto`) answers a process that shows no token.

    Only before this process joins a cluster: meanwhile none of its connections shows one.
    """
    from ray._raylet import GcsClient
    from ray.exceptions import RayError

    def ask(services: Any) -> bool:
        try:
            where = services.canonicalize_bootstrap_address(address)
        except ValueError:  # an address that names nothing: joining it says so
            return False
        try:
            GcsClient(address=where).get_all_node_info(timeout=ANSWER_S)
        except (RayError, ConnectionError, RuntimeError, ValueError):
            return False
        return True

    if TOKENS.find() is None:
        return False
    try:
        with temporary_environment_variables({MODE_VARIABLE: "disabled"}):
            read_variables_again()
            return OPEN_CLUSTER.use(ask, False)
    finally:
        read_variables_again()
