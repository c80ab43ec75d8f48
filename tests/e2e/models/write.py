"""Writes the tiny checkpoint of an architecture, and prints media as a chat brings them.

python write.py ARCHITECTURE DIRECTORY ITEM...
"""

import json
import sys
from pathlib import Path

from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.checkpoint import Checkpoint
from e2e.models.items import part
from e2e.models.table import ARCHITECTURES

if __name__ == "__main__":
    name, directory, *items = sys.argv[1:]
    tried, to = ARCHITECTURES[name], Path(directory)
    to.mkdir()
    tried.make(Checkpoint(to, tried.kind))
    print("RESULT " + json.dumps({item: part(item) for item in items}))
