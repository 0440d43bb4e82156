"""The API server's client, lightkube: the one place that opens it and translates its errors.

Imported only where a command has made sure that lightkube is installed.
"""

import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lightkube import ApiError, AsyncClient, Client, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core import exceptions
from lightkube.core.exceptions import ConfigError

from ocigpu.core.errors import HostError, printable, reason_of
from ocigpu.system.tls import lenient

httpx: Any = exceptions.httpx  # type: ignore[attr-defined] # httpx or httpx2, whichever this lightkube is made with
HTTP_ERROR: type[Exception] = httpx.HTTPError
FAILURES = (HTTP_ERROR, OSError, ConfigError, ValueError, RecursionError)
"""What a request raises: also credentials that a program does not give, and answers that mean nothing."""
HINTS = {
    0: "Is the API server reachable that KUBECONFIG or the service account names?",
    401: "The cluster does not accept the token: sign in again.",
    403: "The account lacks this right: have an administrator grant it, or use another account.",
    409: "Another client created or changed it: check it, then try again.",
    422: "",  # the message names the field
}
"""What to do about a status of HTTP; 0: no answer.  Others have the code's."""
C = TypeVar("C", Client, AsyncClient)
T = TypeVar("T")


def open_client(kind: type[C], kubeconfig: str = "", code: str = "OCIGPU-KUBE-5") -> C:
    """Return a client of a kubeconfig file, "": of the pod's service account, else of $KUBECONFIG or ~/.kube/config.

    No proxy of the environment comes between.  Raises HostError of this code.
    """
    try:
        config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        single = config.get()
        transport = httpx.AsyncHTTPTransport if issubclass(kind, AsyncClient) else httpx.HTTPTransport
        return kind(single, trust_env=False, transport=transport(verify=trust(single), trust_env=False))
    except (*FAILURES, TypeError, LookupError, AttributeError, AssertionError) as error:
        where = kubeconfig or "configuration"
        hint = "In a pod it is the service account; elsewhere set KUBECONFIG."
        raise HostError(code, f"API server: {where}: {reason_of(error)}", hint) from error


def trust(config: SingleConfig | None) -> ssl.SSLContext:
    """Return what checks the API server of a configuration, and proves its user by a certificate if that has one."""
    if config is None or config.user is None:
        raise ConfigError("Missing user")
    return lenient(verify_cluster(config.cluster, config.user, config.abs_file, trust_env=False))


def status_of(error: BaseException | None) -> int:
    """Return the status of HTTP that the server answered with, 0 for no answer."""
    if isinstance(error, ApiError) and error.status.code:
        return error.status.code
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def may_pass(status: int) -> bool:
    """Whether the same request may be answered later that had this status of HTTP, or no answer (0)."""
    return status in (0, 401, 408, 409, 429) or status >= 500


def words_of(error: Exception) -> str:
    """Return the server's message, or why there is no answer."""
    said = error.status.message if isinstance(error, ApiError) else ""
    with suppress(RuntimeError):  # of a stream nothing was read
        said = said or getattr(getattr(error, "response", None), "text", "")
    return said or reason_of(error)


def is_gone(error: Exception, name: str) -> bool:
    """Return whether the API server reports that no object has this name.

    A 404 alone is no proof: a proxy may send one, and so does a server that does not serve the API version.
    """
    status = error.status if isinstance(error, ApiError) else None
    details = status.details if status else None
    return bool(status and details and status.reason == "NotFound" and details.name == name)


def refused(what: str, error: Exception) -> HostError:
    """Return the error of a request that failed (OCIGPU-KUBE-5)."""
    status = status_of(error)
    text = printable(words_of(error), 500)
    hint = "" if "denied request" in text else HINTS.get(status)  # a policy has its own words
    return HostError("OCIGPU-KUBE-5", f"API server: {what}: {f'{status}: ' if status else ''}{text}", hint)


def ask(what: str, request: Callable[[], T], *missing: T) -> T:
    """Return what a request returns, ``missing`` for status 404; raises HostError (OCIGPU-KUBE-5)."""
    try:
        return request()
    except FAILURES as error:
        if missing and status_of(error) == 404:
            return missing[0]
        raise refused(what, error) from error
