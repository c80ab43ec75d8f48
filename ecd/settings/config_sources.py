"""The sources of the settings' values, and how they are merged.

Flags come before `ECD_*` variables, those before the TOML file, that before the defaults.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from ecd.settings.config import ENV_PREFIX, NOT_OURS, SECRETS, Config, ConfigError
from ecd.settings.redaction import without_password

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WANTED = {
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "int_parsing": "must be a whole number",
    "greater_than": "must be more than {gt:g}{unit}",
    "greater_than_equal": "must be at least {ge:g}{unit}",
    "less_than_equal": "must be at most {le:g}{unit}",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}
"""What is allowed, by pydantic's names of errors."""
_READABLE = "(from flag): flags are visible to every user"


def load(flags: dict[str, Any], file: Path | None) -> tuple[Config, dict[str, str]]:
    """Merge the sources: the effective settings, and the origin of each value.

    Raises ConfigError for a value that is not allowed, an unknown name in the file, or a file
    that cannot be read.
    """
    sources = {"default": dict[str, Any]()}
    if file is not None:
        sources[str(file)] = _read(file)
    sources["environment"] = EnvSettingsSource(Config)()
    sources["flag"] = {name: value for name, value in flags.items() if value is not None}
    url = sources["flag"].get("directory")
    if without_password(url) != url:
        raise ConfigError(
            f"directory {_READABLE}, so passwords are not accepted there, only "
            "host, port and database. Use ECD_DIRECTORY or the file"
        )
    origins = dict.fromkeys(Config.model_fields, "default")
    merged: dict[str, Any] = {}
    for origin, values in sources.items():
        merged |= values
        origins |= dict.fromkeys(values, origin)
    try:
        return Config(**merged), origins
    except ValidationError as error:
        lines = dict.fromkeys(_sentence(wrong, origins, merged) for wrong in error.errors())
        raise ConfigError("\n".join(lines)) from None


def _sentence(wrong: ErrorDetails, origins: dict[str, str], values: dict[str, Any]) -> str:
    if not wrong["loc"]:
        return wrong["msg"].removeprefix("Value error, ")
    name = str(wrong["loc"][0])
    begin = f"{name} (from {origins[name]})"
    setting = Config.model_fields.get(name)
    if setting is None and isinstance(wrong["input"], dict):
        return f"{begin} is a table: put settings at the top level (only namespace_* are tables)"
    if setting is None:
        return f"{begin} is no setting: {_meant(name, Config.model_fields)}"
    if len(wrong["loc"]) > 1 or wrong["type"] == "string_pattern_mismatch":
        return f"{begin}: got {_shown(name, wrong['input'])}. {setting.description}"
    wanted = WANTED.get(wrong["type"], "")
    if name == "warm_restart":
        wanted = "must be true, false or auto"
    unit = "s" if setting.annotation is float else ""
    said = wanted.format(**wrong.get("ctx", {}), unit=unit)
    said = said or wrong["msg"].removeprefix("Value error, ")
    return f"{begin}: {said}, got {_shown(name, values.get(name, wrong['input']))}"


def _meant(name: str, known: Iterable[str]) -> str:
    bare = {each.removeprefix(ENV_PREFIX): each for each in known}  # or all would be alike
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), bare, n=1)
    return f"is {bare[near[0]]} meant?" if near else "see `ecd config`"


def _shown(name: str, value: object) -> str:
    """The wrong value, or its length if it may be a secret or have one, such as a URL's."""
    if name in (*SECRETS, "directory") or re.search("://|@", str(value)):
        return f"{len(str(value))} characters"
    return repr(value)


def unknown_variables() -> list[str]:
    """Say which `ECD_*` variables are no settings, most likely misspelt, and what they may mean."""
    known = {f"{ENV_PREFIX}{name}".upper() for name in Config.model_fields} | NOT_OURS
    found = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    return [f"{name} is not a setting of ecd: {_meant(name, known)}" for name in found]


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a directory, not a TOML file")
        if not file.exists():
            raise ConfigError(f"no such file: {file}")
        values: dict[str, Any] = tomllib.loads(file.read_text())
        return values
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
