"""How many random examples the state machines of the core run."""

import os


def examples(count: int) -> int:
    """`count`, or the share of it that ECD_EXAMPLES asks for: `make unit` runs a fifth."""
    return max(1, int(count * float(os.environ.get("ECD_EXAMPLES", "1"))))
