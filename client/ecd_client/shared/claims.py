"""Claims of all sessions: puts that are announced in a page and have no answer yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ecd_client.shared.board import MappedBoard
from ecd_proto.shm.index import INDEX_HEADER_BYTES, MAILBOXES_AT, PAGES_WORD
from ecd_proto.shm.rows import row_has_key
from ecd_proto.shm.session_page import (
    CLAIM_DONE,
    CLAIM_NUMBER,
    CLAIM_ROW,
    CLAIM_WORDS,
    CLAIMS_WORD,
    FIRST_ANSWER_WORD,
    MAILBOX_BYTES,
    MAILBOX_WORDS,
    MAX_CLAIMS,
    PAGE_WORDS,
    answer_to,
    claim_at,
)


class SeenClaim(NamedTuple):
    """A claim as another process sees it: the row may be half written, or nonsense.

    `at` and `answer_at` are its first word in the pages, and its answer's in the mailboxes.
    """

    is_done: bool
    row: bytes
    number: int
    at: int
    answer_at: int


class ClaimReader:
    """Finds the claims of a key in the pages of all sessions."""

    def __init__(self, board: MappedBoard) -> None:
        self._header = board.index.view(0, INDEX_HEADER_BYTES).cast("Q")
        self._pages = board.pages.view(0, board.pages.nbytes).cast("Q")
        self._mailboxes = board.index.view(
            MAILBOXES_AT, board.shape.mailboxes * MAILBOX_BYTES
        ).cast("Q")
        self._own = board.page_number

    def of(self, record: bytes, others_only: bool = False) -> Iterator[SeenClaim]:
        """The claims of this key, of this session too unless `others_only`."""
        pages = self._pages
        used = self._header[PAGES_WORD] * PAGE_WORDS
        for page, count in enumerate(pages[CLAIMS_WORD:used:PAGE_WORDS].tolist()):
            if not count or (others_only and page == self._own):
                continue
            first = page * PAGE_WORDS + claim_at(0)
            numbers = pages[first : first + MAX_CLAIMS * CLAIM_WORDS : CLAIM_WORDS].tolist()
            for place, number in enumerate(numbers):
                at = first + place * CLAIM_WORDS
                answer = page * MAILBOX_WORDS + FIRST_ANSWER_WORD + place
                if not number or answer_to(number, self._mailboxes[answer]):
                    continue
                row = pages[at + CLAIM_ROW : at + CLAIM_WORDS].tobytes()
                if row_has_key(row, record):
                    yield SeenClaim(pages[at + CLAIM_DONE] == number, row, number, at, answer)

    def is_still(self, claim: SeenClaim) -> bool:
        """Whether a claim that was seen to be done is still unanswered.

        The answer is read first: the words read after it show that it was this claim's.
        """
        pages, at, number = self._pages, claim.at, claim.number
        return (
            not answer_to(number, self._mailboxes[claim.answer_at])
            and pages[at + CLAIM_ROW : at + CLAIM_WORDS].tobytes() == claim.row
            and pages[at + CLAIM_NUMBER] == number == pages[at + CLAIM_DONE]
        )

    def any_done(self, record: bytes) -> bool:
        """Whether a put of this key is done, and the daemon has yet to list it."""
        return any(claim.is_done for claim in self.of(record))

    def any_elsewhere(self, record: bytes) -> bool:
        """Whether another session has claimed this key."""
        return next(self.of(record, others_only=True), None) is not None
