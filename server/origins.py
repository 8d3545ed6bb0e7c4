"""Who may call: a guard around the application against web pages of strangers.

Comes in every HTTP request, goes out the request itself, 403 with an empty body, or the answer to
a preflight. Two checks: a page's Origin must be allowed (CORS, and forged requests that need no
preflight), and on a loopback bind the Host must name this machine (DNS rebinding).
Knows nothing of routes; its answers carry no text.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_NAMES = ("localhost", "127.0.0.1", "0.0.0.0")
# One * stands for any text. Extensions are code that the user installed; pages are not.
DEFAULT_ORIGINS = (
    *(f"{scheme}://{name}" for scheme in ("http", "https") for name in LOCAL_NAMES),
    *(f"{scheme}://{name}:*" for scheme in ("http", "https") for name in LOCAL_NAMES),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
    *("chrome-extension://*", "moz-extension://*", "safari-web-extension://*"),
)
STAINLESS = (
    *("Arch", "Async", "Custom-Poll-Interval", "Helper-Method", "Lang", "Os", "Package-Version"),
    *("Poll-Helper", "Retry-Count", "Runtime", "Runtime-Version", "Timeout"),
)
ALLOWED_HEADERS = ", ".join(
    (
        *("Authorization", "Content-Type", "User-Agent", "Accept", "X-Requested-With"),
        "OpenAI-Beta",
        *(f"X-Stainless-{name}" for name in STAINLESS),
    )
)
PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS",
    "Access-Control-Allow-Headers": ALLOWED_HEADERS,
    "Access-Control-Max-Age": "43200",
    "Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
}
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class OriginGuard:
    """ASGI middleware; origins are allowed beside the defaults, "*" allows all."""

    def __init__(self, app: ASGIApp, bound_host: str, origins: Iterable[str] = ()) -> None:
        self._app = app
        self._patterns = (*(origin.lower() for origin in origins), *DEFAULT_ORIGINS)
        self._allows_all = "*" in self._patterns
        self._hosts = LocalHosts() if is_loopback(bound_host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        is_foreign = origin is not None and origin not in (f"http://{host}", f"https://{host}")
        if self._hosts is not None and host not in self._hosts:
            await Response(status_code=403)(scope, receive, send)
        elif origin is not None and is_foreign and not self.allows(origin):
            await Response(status_code=403)(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            preflight = PREFLIGHT_HEADERS | self._allow(origin) if origin and is_foreign else {}
            await Response(status_code=204, headers=preflight)(scope, receive, send)
        elif origin is not None and is_foreign:
            await self._app(scope, receive, _with_headers(send, self._allow(origin)))
        else:
            await self._app(scope, receive, send)

    def allows(self, origin: str) -> bool:
        """Return whether pages of origin may call."""
        return any(_matches(origin.lower(), pattern) for pattern in self._patterns)

    def _allow(self, origin: str) -> dict[str, str]:
        return {"Access-Control-Allow-Origin": "*" if self._allows_all else origin}


def _matches(origin: str, pattern: str) -> bool:
    head, star, tail = pattern.partition("*")
    if not star:
        return origin == pattern
    is_long_enough = len(origin) >= len(head) + len(tail)
    return is_long_enough and origin.startswith(head) and origin.endswith(tail)


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    """Return send, with headers added to the start of the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
            MutableHeaders(scope=message).add_vary_header("Origin")
        await send(message)

    return send_with_headers


def is_loopback(host: str) -> bool:
    """Return whether a server bound to host is reached from this machine only."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


class LocalHosts:
    """The Host headers that mean this machine or a name that no outside DNS server answers for."""

    def __init__(self) -> None:
        self._names = {"", "localhost", socket.gethostname().lower()}

    def __contains__(self, host: str) -> bool:
        name = _without_port(host).lower()
        address = _address(name)
        if address is None:
            return name in self._names or name.endswith(LOCAL_SUFFIXES)
        is_near = address.is_loopback or address.is_private or address.is_unspecified
        return is_near or _is_ours(name)


def _is_ours(address: str) -> bool:
    """Return whether a network interface of this machine has address now: others can't be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _without_port(host: str) -> str:
    """Return the name of a Host header: `[::1]:80`, `::1`, `name:80` and `name` are understood."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
