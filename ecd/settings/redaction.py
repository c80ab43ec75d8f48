"""Settings without their secrets, for display."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_REPEATED = re.compile("(with args beginning with:).*", re.DOTALL)
_SECRET_NAME = re.compile("PASS|SECRET|TOKEN|KEY|AUTH|CRED", re.IGNORECASE)


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, as pydantic dumps them."""
    return {**settings, "directory": without_password(settings["directory"])}


def without_password(url: str | None) -> str | None:
    """A directory as it may be shown: scheme, host, port, database and the names of parameters.

    redis-py takes a password before the host and among the parameters. One with a slash, "?", "#"
    or "@" in it is cut anywhere: nothing but the scheme is shown then.
    """
    if url is None or "://" not in url:
        return url
    scheme, _, after = url.partition("://")
    hidden = f"{scheme}://{HIDDEN}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return hidden
    userinfo, at, host = parts.netloc.rpartition("@")
    rest = after[len(parts.netloc) :]
    if "@" in rest or "@" in userinfo or not _HOST.fullmatch(host):
        return hidden
    shown = f"{scheme}://{HIDDEN if at else ''}{at}{host}"
    if parts.path not in ("", "/"):
        shown += parts.path if parts.path[1:].isdecimal() else f"/{HIDDEN}"
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if not all(name.replace("_", "").isalpha() for name in names):
        return hidden
    shown += "?" * bool(names) + "&".join(f"{name}={HIDDEN}" for name in names)
    return shown + f"#{HIDDEN}" * bool(parts.fragment)


def answer_without_password(text: str, url: str) -> str:
    """An answer of the server at the URL, without the password that a refused login may repeat.

    Redis repeats the arguments of a command that it does not know, such as HELLO before Redis 6,
    and cuts long ones: all of them are hidden.
    """
    text = _REPEATED.sub(rf"\1 {HIDDEN}", text)
    parts = urlsplit(url)
    named = (value for name, value in parse_qsl(parts.query) if _SECRET_NAME.search(name))
    for secret in filter(None, (unquote(parts.password or ""), *named)):
        text = text.replace(secret, HIDDEN)
    return text
