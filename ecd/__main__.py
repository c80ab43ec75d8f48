"""`ecd`: prints one line if the daemon's packages are missing, as beside vLLM."""

from __future__ import annotations

import shlex
import sys

OF_ECD_CLI = (
    *("status", "top", "doctor", "bench", "ls", "namespaces", "get", "put", "evict", "peers"),
    *("locate", "encoders", "watch", "slow", "keep", "unkeep", "clients"),
)
"""Commands that newcomers ask of `ecd`."""


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in OF_ECD_CLI:
        meant = shlex.join(["ecd-cli", *sys.argv[1:]])
        sys.stderr.write(f"ecd runs the daemon. Ask one that runs with: {meant}\n")
        sys.exit(2)
    try:
        from ecd.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("ecd", "ecd_proto"):
            raise
        sys.exit(
            f"ecd: the daemon is not installed here ({error.name} is missing), only its client. "
            "Install ecd with [cpu], or with [cuda] on a CUDA machine: pip install '.[cpu]'"
        )
    from ecd_proto import tables

    tables.open_closed()
    if sys.argv[1:2] == ["serve"]:
        app()
    try:
        with tables.printing():
            app()
    except tables.CannotPrint as error:
        sys.exit(f"ecd: {error}")


if __name__ == "__main__":
    main()
