"""The token with which this process authenticates to Ray, and whether a cluster requires one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

from raypar.errors import ClusterError
from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED
from raypar.ray_compat.settings import TOKEN_VARIABLE, temporary_environment_variables

ANSWER_S = 5.0
"""How long the control store may take to answer `control_store_lets_in_without_token`."""
MODE_VARIABLE = "RAY_AUTH_MODE"
"""The variable that says whether Ray's processes require a token. raypar's local clusters ignore `disabled`."""


def _look_for_tokens() -> ModuleType:
    import ray._raylet as raylet

    assert callable(raylet.Config.initialize) and callable(raylet.AuthenticationTokenLoader.instance().reset_cache)
    found: ModuleType = raylet
    return found


TOKENS = Fence(
    api="ray._raylet.AuthenticationTokenLoader",
    reason="Ray reads the token's variables once per process, and no public API makes it read them again",
    versions=TESTED,
    feature="setting the token of Ray's connections",
    without="no local Ray cluster is started, as other users of this machine could enter it; to join a cluster, set "
    "RAY_AUTH_MODE and RAY_AUTH_TOKEN before this process starts",
    probe=_look_for_tokens,
)


def _look_for_mode() -> Callable[[], bool]:
    from ray._raylet import AuthenticationMode, get_authentication_mode

    disabled = AuthenticationMode.DISABLED
    return lambda: bool(get_authentication_mode() != disabled)


MODE = Fence(
    api="ray._raylet.get_authentication_mode",
    reason="no public API says whether this process authenticates with a token",
    versions=TESTED,
    feature="knowing whether a cluster requires a token",
    without="the run's first lines say that it requires none",
    probe=_look_for_mode,
)


@contextlib.contextmanager
def token_authentication(token: str) -> Iterator[None]:
    """Have this process, and those that it starts in the block, send and require `token` in all of Ray's connections.

    Ray caches both variables, so it is made to read them again, also after the block: the user's own `ray.init` then finds this
    process as it was. Raises `ClusterError` if this Ray cannot read them again.
    """
    try:
        with temporary_environment_variables({MODE_VARIABLE: "token", TOKEN_VARIABLE: token}):
            read_variables_again()
            yield
    finally:
        with contextlib.suppress(ClusterError):
            read_variables_again()


def read_variables_again() -> None:
    """Have Ray read the authentication mode and the token again. Raises `ClusterError` if this Ray cannot."""
    with TOKENS.requiring() as raylet:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def shows_token() -> bool:
    """Whether this process sends its token in Ray's connections, and requires it of others."""
    return MODE.use(lambda shows: bool(shows()), False)


def _look_for_addresses() -> ModuleType:
    from ray._private import services
    from ray._raylet import GcsClient

    assert callable(services.canonicalize_bootstrap_address) and callable(GcsClient)
    return services


OPEN_CLUSTER = Fence(
    api="ray._private.services.canonicalize_bootstrap_address",
    reason="whether a cluster admits everybody can only be seen by a request to it before joining it",
    versions=TESTED,
    feature="seeing whether a cluster admits processes without a token",
    without="the run's first lines do not warn of a cluster that does",
    probe=_look_for_addresses,
)


def control_store_lets_in_without_token(address: str) -> bool:
    """Whether the control store at `address` (`host:port` or `auto`) answers a process that sends no token.

    Only for use before this process joins a cluster: none of its connections has a token during the call.
    """
    from ray._raylet import GcsClient
    from ray.exceptions import RayError

    def ask(services: ModuleType) -> bool:
        try:
            where = services.canonicalize_bootstrap_address(address)
        except ValueError:  # an invalid address: joining the cluster raises the error for it
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
