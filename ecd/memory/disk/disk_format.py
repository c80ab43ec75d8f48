"""The format of the disk tier's files: a header, and the entry's bytes, both in whole blocks."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError

from ecd.base.wire import InvalidRequest, content_from, key_from, to_content, to_key
from ecd.core.demotion import rounded
from ecd.core.model.types import Content, Key
from ecd_proto.v1 import cache_pb2 as pb

SUFFIX = ".entry"
MAX_HEADER_BYTES = 16 << 10
"""More than the longest key and metadata need."""
_MAGIC, _VERSION = b"ecd-disk", 1
_HEADER = struct.Struct("<8sIIQIIQ")
"""Magic, version, header's bytes, entry's checksum, bytes of key and content, own checksum."""


class CorruptFile(Exception):
    """The file differs from what was written."""


class Header(NamedTuple):
    key: Key
    content: Content
    checksum: int  # of the entry's bytes

    def pack(self) -> bytes:
        """The header, of whole blocks."""
        key = to_key(self.key).SerializeToString()
        content = to_content(self.content).SerializeToString()
        nbytes = rounded(_HEADER.size + len(key) + len(content))
        fields = _MAGIC, _VERSION, nbytes, self.checksum, len(key), len(content)
        packed = (_HEADER.pack(*fields, 0) + key + content).ljust(nbytes, b"\0")
        return _HEADER.pack(*fields, xxhash.xxh3_64_intdigest(packed)) + packed[_HEADER.size :]

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """Raises CorruptFile."""
        try:
            *fields, own = _HEADER.unpack_from(packed)
            magic, version, nbytes, checksum, of_key, of_content = fields
            rest = packed[_HEADER.size :]
            is_right = (magic, version, nbytes) == (_MAGIC, _VERSION, len(packed))
            if not is_right or own != xxhash.xxh3_64_intdigest(_HEADER.pack(*fields, 0) + rest):
                raise CorruptFile("no such header was written")
            key = key_from(pb.Key.FromString(rest[:of_key]))
            content = content_from(pb.Content.FromString(rest[of_key : of_key + of_content]))
        except (struct.error, DecodeError, UnicodeDecodeError, InvalidRequest) as error:
            raise CorruptFile(f"no header: {error}") from None
        return cls(key, content, checksum)


class Found(NamedTuple):
    """A file that lay in the directory at the start."""

    header: Header
    file_bytes: int
    age_s: float  # since the entry was put
    idle_s: float  # since it was written here


def file_name(key: Key) -> str:
    namespace = key.namespace.encode()
    name = len(namespace).to_bytes(8, "little") + namespace + key.mm_hash.encode()
    return hashlib.blake2b(name, digest_size=16).hexdigest() + SUFFIX


def header_bytes(block: bytes) -> int:
    """The size of the header that begins with this block, if it is plausible."""
    size: int = _HEADER.unpack_from(block)[2]
    return size
