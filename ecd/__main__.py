"""`ecd`: one line where the daemon's packages are missing, as beside vLLM."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from ecd.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("ecd", "ecd_proto"):
            raise
        sys.exit(
            f"ecd: the daemon is not installed here ({error.name} is missing), only its client. "
            "Install ecd with [cpu], or with [cuda] on a CUDA machine: pip install '.[cpu]'"
        )
    app()


if __name__ == "__main__":
    main()
