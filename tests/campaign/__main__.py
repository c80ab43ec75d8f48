"""Throw faults at a small cluster for some minutes, and check every byte that anybody reads.

    python -m campaign [--seed N] [--minutes M] [--engines] [--bug B]
                       [--output FILE.md] [--json FILE.json]
    python -m campaign --add FILE.json ... --output FILE.md

Draws every fault from the seed, lane by lane. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from campaign.bugs import BUGS
from campaign.report import markdown
from campaign.run import campaign
from support.processes import run


def commit() -> str:
    """What the tree is of; with a + if it differs from it."""
    command = "git", "describe", "--always", "--dirty=+"
    said = run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="of the clock, once all daemons have started"
    )
    parser.add_argument("--engines", action="store_true", help="with two vLLM engines")
    parser.add_argument("--bug", choices=BUGS, help="put it in, and end when it is found")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="for logs; by default a new one")
    parser.add_argument("--add", type=Path, nargs="*", help="results to add up, with no run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.add:
        results = [json.loads(path.read_text()) for path in options.add]
    else:
        directory = options.directory or Path(tempfile.mkdtemp(prefix="ecd-campaign-"))
        directory.mkdir(exist_ok=True)
        print(f"seed {options.seed}, logs in {directory}", flush=True)
        result = campaign(directory, options.seed, options.minutes, options.engines, options.bug)
        results = [{**result, "commit": commit()}]
    if options.json:
        options.json.write_text(json.dumps(results[0]))
    print(markdown(results))
    if options.output:
        options.output.write_text(markdown(results))
    return 1 if any(result["violations"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
