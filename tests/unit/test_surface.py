"""Names, messages, settings, exit codes and error texts change on purpose alone."""

from __future__ import annotations

from support.surface import LIST, surface


def test_what_users_see_is_what_the_list_says() -> None:
    listed, found = set(LIST.read_text().splitlines()), set(surface())
    changed = [f"- {line}" for line in sorted(listed - found)]
    changed += [f"+ {line}" for line in sorted(found - listed)]
    assert not changed, "`python -m support.surface`, if meant:\n" + "\n".join(changed)
