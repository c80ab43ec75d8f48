"""What files hold, in a name: a digest that reads a small part of large ones.

A digest never depends on a file's times, owner, links or place, so copies of one directory have
one digest. Of a file of weights it holds the size, the list of its tensors, and a part of each
tensor, whatever it is called. Training changes nearly every element of a tensor, or of one of the
few that were fused into it, so that any trained tensor gives another digest. A single element that
is edited in the midst of a large tensor may not. A file that does not list its tensors is read
whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ecd_client import clock

BLOCK_BYTES = 4 << 10
TENSOR_BLOCKS = 8
"""Blocks of a tensor that are read, from its first byte to its last; a tensor of fewer is whole."""
EXPERT_BYTES = 512
"""Bytes read of a tensor of a numbered expert: a model may have 100,000, an encoder has none."""
SPREAD_BLOCKS = 1024
"""Blocks of a large file that is not a file of weights, or whose tensors have checksums."""
WHOLE_WEIGHTS_BYTES = 1 << 20
"""Size up to which a file of weights is read whole."""
WHOLE_BYTES = 64 << 20
"""Size up to which any other file is read whole: configurations, code, tokenizers."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as its own library has it."""
MAX_FILES = 10_000
MAX_DEPTH = 4
THREADS = 16

WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy"))
"""Files that an engine may load; sources.py admits no loader of `.gguf`."""
IGNORED = re.compile(
    r"\..*|__pycache__.*|.*\.(?:lock|log|md|pyc|png|jpe?g)|SHA256SUMS"
    r"|(?:README|LICENSE)(?:[^.]*|.*\.(?:txt|rst|pdf))"
    r"|events\.out\.tfevents.*|training_args\.bin|trainer_state\.json"
    r"|(?:optimizer|scheduler)\.pt|rng_state.*\.pth",
    re.IGNORECASE | re.DOTALL,
)
"""Files that say nothing about a model and differ between copies, or change as it is used."""
NOT_OF_THE_FORMAT = (
    *(ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError),
    *(zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, MemoryError),
)
"""Errors of reading a file of another format, or a damaged one."""
_EXPERT = re.compile(r"experts?[._]\d")
"""Part of the name of a numbered expert's tensor."""
_BLOB = re.compile(r"(?:\.\./)+blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})")


class Unnamed(Exception):
    """These weights have no name; the message says why."""


class Digest(NamedTuple):
    hex: str
    changed: bool
    """Whether a file has changed since `since_s`, so that something else may have been read."""


def digest_of(
    source: Path,
    since_s: float,
    without: frozenset[str] = frozenset(),
    *,
    is_snapshot: bool = False,
) -> Digest:
    """Name the content of a file, or of a directory and what is below it.

    `since_s` is a time of day in seconds; directories of the names `without` in the source do not
    count. A file of the hub's snapshot that was downloaded since then has not changed. Raises
    Unnamed where a file cannot be read, or where there are more than MAX_FILES.
    """
    now_s = clock.unix_s()

    def described(path: Path) -> tuple[str, int, str, bool]:
        name = path.name if path == source else path.relative_to(source).as_posix()
        try:
            with path.open("rb") as file:
                stats = [os.fstat(file.fileno()), path.lstat()]  # a link may lead elsewhere now
                size = stats[0].st_size
                content = _content(file, size, path.suffix)
                stats.append(os.fstat(file.fileno()))
        except OSError as error:
            raise Unnamed(f"{path} cannot be read: {error.strerror}") from None
        if is_snapshot:  # the hub's library makes a link when the blob is complete
            link = stats.pop(1)
            stats = [each for each in stats if each.st_ctime_ns > link.st_ctime_ns]
        changed = any(_is_newer(each, since_s, now_s) for each in stats)
        return name, size, content, changed

    with ThreadPoolExecutor(THREADS) as readers:
        files = list(readers.map(described, sorted(_files(source, without))))
    changed = any(file[3] for file in files) or _is_moved(source, since_s, now_s)
    listed = sorted(file[:3] for file in files)
    return Digest(hashlib.sha256(repr(listed).encode()).hexdigest()[:32], changed)


def commit_of(directory: Path, without: frozenset[str] = frozenset()) -> str | None:
    """The commit whose snapshot the directory is, if every file is a link to a blob of the hub's.

    The hub's cache keeps a file under the hash of its content, and a snapshot holds links alone.
    The hash of small files is made anew. No time says whether a large one was edited, as a copy's
    times are anything; nor does the commit say which of its files are there. So the digest of all
    files counts beside it.
    """
    place = directory.resolve()
    snapshot = _SNAPSHOT.search(str(place))
    if snapshot is None or snapshot.end() != len(str(place)):
        return None
    blobs = place.parents[1] / "blobs"
    try:
        files = list(_files(directory, without))
        are_hubs_own = bool(files) and all(_is_hubs_own(file, blobs) for file in files)
    except (OSError, Unnamed):
        return None
    return snapshot[1] if are_hubs_own else None


def content_of(path: str | Path) -> str | None:
    """The digest of one file, whatever its size; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return _content(file, os.fstat(file.fileno()).st_size, Path(path).suffix)
    except OSError:
        return None


# -- which files -----------------------------------------------------------------------------------


def _files(source: Path, without: frozenset[str]) -> Iterator[Path]:
    """The files of a model: the source itself, or those in it and below it that are not hidden."""
    if source.is_file():
        yield source
        return
    found = 0
    for at, directories, names in os.walk(source, followlinks=True):
        depth = len(Path(at).relative_to(source).parts)
        directories[:] = sorted(name for name in directories if _counts(name))
        if depth == 0:
            directories[:] = [name for name in directories if name not in without]
        if depth == MAX_DEPTH:
            directories.clear()
        for name in names:
            path = Path(at, name)
            if _counts(name) and path.is_file():  # a link that leads nowhere cannot be loaded
                found += 1
                if found > MAX_FILES:
                    raise Unnamed(f"{source} has more than {MAX_FILES} files")
                yield path


def _counts(name: str) -> bool:
    return not IGNORED.fullmatch(name)


def _is_newer(stats: os.stat_result, since_s: float, now_s: float) -> bool:
    """Whether the file may have changed since then.

    Every change sets the `ctime`. The `mtime` can be set to anything: one that is still to come
    says nothing.
    """
    return stats.st_ctime > since_s or since_s < stats.st_mtime <= now_s


def _is_moved(source: Path, since_s: float, now_s: float) -> bool:
    """Whether another file or directory may have stood in the source's place.

    A link that was made anew is newer; a directory that was renamed has a new `ctime` alone.
    """
    ways, seen = [source.absolute()], set[Path]()
    while ways:
        way = ways.pop()
        for path in (way, *way.parents):
            if path in seen:
                continue
            seen.add(path)
            stats = path.lstat()
            if path.is_symlink():
                if _is_newer(stats, since_s, now_s):
                    return True
                ways.append(path.parent / os.readlink(path))
            elif path.is_dir() and stats.st_ctime > max(since_s, stats.st_mtime):
                return True
    return False


def _is_hubs_own(file: Path, blobs: Path) -> bool:
    """Whether the file is a link to a blob, which has the content of its name if it is small."""
    if not file.is_symlink():
        return False
    target = _BLOB.fullmatch(os.readlink(file))
    if target is None or file.resolve() != blobs / target[1]:
        return False
    if file.suffix in WEIGHT_SUFFIXES or file.stat().st_size > WHOLE_BYTES:
        return True
    content = file.read_bytes()
    if len(target[1]) == 64:
        return hashlib.sha256(content).hexdigest() == target[1]
    as_git = b"blob %d\0" % len(content)
    return hashlib.sha1(as_git + content, usedforsecurity=False).hexdigest() == target[1]


# -- what is read of one ---------------------------------------------------------------------------


class _Region(NamedTuple):
    start: int
    end: int


def _content(file: BinaryIO, size: int, suffix: str) -> str:
    """The digest of a file's content, or of the parts of it that its size and tensors decide."""
    is_weights = suffix in WEIGHT_SUFFIXES
    parts = None
    if size > (WHOLE_WEIGHTS_BYTES if is_weights else WHOLE_BYTES):
        parts = _parts(file, size) or (None if is_weights else _spread(size))
    said, regions = parts or (b"", [_Region(0, size)])
    hashed = hashlib.sha256(said)
    descriptor = file.fileno()
    regions = _merged(regions)
    if parts:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads ahead
        for start, end in regions:
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
    for start, end in regions:
        while start < end and (read := os.pread(descriptor, min(end - start, 1 << 20), start)):
            hashed.update(read)
            start += len(read)
    return hashed.hexdigest()


_Parts = tuple[bytes, list[_Region]]
"""A large file's description of itself, and the regions of it to read."""


def _parts(file: BinaryIO, size: int) -> _Parts | None:
    """The parts of a file that lists its tensors; None for any other."""
    for read in (_of_safetensors, _of_zip, _of_numpy):
        file.seek(0)
        try:
            if parts := read(file, size):
                return parts
        except NOT_OF_THE_FORMAT:
            continue
    return None


def _of_safetensors(file: BinaryIO, size: int) -> _Parts | None:
    """The header, and blocks of each tensor."""
    header_bytes = int.from_bytes(file.read(8), "little")
    base = 8 + header_bytes
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or base > size:
        return None
    header = file.read(header_bytes)
    regions: list[_Region] = []
    for name, tensor in json.loads(header).items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        region = _Region(base + int(first), base + int(last))
        if not base <= region.start <= region.end <= size:
            return None
        if _EXPERT.search(name):
            regions += _blocks(region, 1, EXPERT_BYTES)
        else:
            regions += _blocks(region, TENSOR_BLOCKS)
    return header, regions


def _of_zip(file: BinaryIO, size: int) -> _Parts:
    """The checksum of each record, as PyTorch and NumPy write one for each tensor.

    Records without a checksum are read whole: PyTorch writes 0 where it is told to make none.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    records.sort(key=lambda record: record.header_offset)
    ends = [*(record.header_offset for record in records[1:]), size]
    _, regions = _spread(size)
    for record, end in zip(records, ends, strict=False):
        if record.CRC == 0:
            regions.append(_Region(record.header_offset, end))
    return repr([(each.filename, each.file_size, each.CRC) for each in records]).encode(), regions


def _of_numpy(file: BinaryIO, size: int) -> _Parts | None:
    """Blocks of the one array that it holds."""
    return _spread(size) if file.read(6) == b"\x93NUMPY" else None


def _spread(size: int) -> _Parts:
    return b"", _blocks(_Region(0, size), SPREAD_BLOCKS)


def _blocks(within: _Region, count: int, block_bytes: int = BLOCK_BYTES) -> list[_Region]:
    """Blocks spread over a region, from its first byte to its last; or all of a small region."""
    start, end = within
    if end - start <= count * block_bytes:
        return [within]
    if count == 1:
        middle = start + (end - start) // 2
        return [_Region(middle, min(end, middle + block_bytes))]
    step = (end - start - block_bytes) / (count - 1)
    places = [start + int(step * number) for number in range(count)]
    return [_Region(place, place + block_bytes) for place in places]


def _merged(regions: list[_Region]) -> list[_Region]:
    """The regions in the file's order, adjacent ones merged."""
    merged: list[_Region] = []
    for region in sorted(regions):
        if merged and region.start <= merged[-1].end:
            merged[-1] = _Region(merged[-1].start, max(merged[-1].end, region.end))
        else:
            merged.append(region)
    return merged
