"""Files are named by what they hold: not by their times, their place, or what they are called."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ecd_client.vllm.base.identity import digest
from ecd_client.vllm.base.identity.digest import Unnamed, commit_of, digest_of
from ecd_client.vllm.base.identity.sources import Sources

NEVER = float("inf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {
    "config.json": "{}",
    "preprocessor_config.json": '{"image_mean": [0.5]}',
    "video_preprocessor_config.json": '{"image_mean": [0.4]}',
    "processing.py": "MEAN = 0.5",
    "license_plates.py": "SIZE = 1",
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.model": "words",
    "merges.txt": "a b",
    "whisper/params": "1",
}
TOWERS = [
    *("mlp1.1.weight", "mlp1.3.weight", "vpm.encoder.layers.0.fc1.weight", "apm.conv1.weight"),
    *("mlp_AR.linear_1.weight", "model.aligner.layers.0.weight", "connector.proj.weight"),
    *("model.sam_model.blocks.0.attn.qkv.weight", "vit.blocks.0.attn.qkv.weight", "vte.weight"),
    "model.qwen2_model.model.model.layers.0.self_attn.qkv.weight",
]
"""Names of encoders' tensors in models of the hub."""
SAYING_NOTHING = [
    *("README.md", "README.MD", "README", "LICENSE.txt", "SHA256SUMS", "train.log", "figure.png"),
    *("photo.jpg", "events.out.tfevents.1700000000.host.1.0", ".cache/download.json"),
    *("training_args.bin", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    *("rng_state_0.pth", "step-5/optimizer.pt"),
]


def name_of(source: Path) -> str:
    return digest_of(source, NEVER).hex


def changed(source: Path, since_s: float) -> bool:
    return digest_of(source, since_s).changed


def tensors() -> dict[str, torch.Tensor]:
    """Of 3 MiB: large and small ones, of a tower and of a language model."""
    shapes = [(512, 700), (300, 301), (64, 64), (7000,), (33,), (1,)]
    return {
        f"{part}.layers.{number}": torch.randn(shape).to(torch.bfloat16)
        for part in ("visual", "model")
        for number, shape in enumerate([*shapes, *shapes[1:]])
    }


def write_safetensors(to: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, to / "model.safetensors")


def write_zip(to: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, to / "pytorch_model.bin")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "whisper").mkdir(parents=True)
    for name, content in SMALL.items():
        (directory / name).write_text(content)
    write_safetensors(directory, tensors())
    return directory


@pytest.mark.parametrize("write", [write_safetensors, write_zip])
def test_any_trained_tensor_gives_another_name(
    write: Callable[[Path, dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    weights = tensors()
    names = set()
    for trained in (None, *weights):
        update = {} if trained is None else {trained: weights[trained] * 1.1}
        write(tmp_path, {**weights, **update})
        for file in tmp_path.iterdir():
            os.utime(file, (0, 0))
        names.add(name_of(tmp_path))
    assert len(names) == len(weights) + 1


def write_legacy(to: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, to / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_without_checksums(to: Path, weights: dict[str, torch.Tensor]) -> None:
    makes_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_zip(to, weights)
    finally:
        torch.serialization.set_crc32_options(makes_checksums)


@pytest.mark.parametrize("write", [write_legacy, write_without_checksums])
def test_any_bias_counts_of_a_file_that_has_no_checksums(
    write: Callable[[Path, dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    biases = [torch.randn(512) for _ in range(16)]
    weights = {f"{number}.bias": bias for number, bias in enumerate(biases)}
    weights |= {f"{number}.weight": torch.zeros(1 << 19) for number in range(16)}
    write(tmp_path, dict(sorted(weights.items())))
    (file,) = tmp_path.iterdir()
    content, names = file.read_bytes(), {name_of(tmp_path)}
    for bias in biases:
        file.write_bytes(content.replace(bias.numpy().tobytes(), bytes(4 * 512)))
        names.add(name_of(tmp_path))
    assert len(names) == len(biases) + 1


def write_holes(file: Path, names: list[str], tensor_bytes: int) -> dict[str, int]:
    """Tensors that are holes of the file; where each begins."""
    starts = {name: number * tensor_bytes for number, name in enumerate(names)}
    header = {
        name: {"data_offsets": [start, start + tensor_bytes]} for name, start in starts.items()
    }
    packed = json.dumps(header).encode()
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as shard:
        shard.write(len(packed).to_bytes(8, "little") + packed)
        shard.truncate(8 + len(packed) + len(names) * tensor_bytes)
    return {name: 8 + len(packed) + start for name, start in starts.items()}


def write_over(file: Path, start: int, nbytes: int, byte: bytes = b"t") -> None:
    with file.open("r+b") as shard:
        shard.seek(start)
        shard.write(byte * nbytes)


def beside_voices(model: Path) -> list[str]:
    (model / "voices").mkdir()
    for number in range(24):
        torch.save({}, model / "voices" / f"{number}.pt")
    return [f"model.layers.{number}.mlp.down_proj.weight" for number in range(336)]


def above_checkpoints(model: Path) -> list[str]:
    for step in range(60):
        for shard in range(4):
            write_holes(model / f"checkpoint-{step}" / f"{shard}.safetensors", TOWERS, 2)
    return [f"model.layers.{number}.mlp.down_proj.weight" for number in range(40)]


def quantised(model: Path) -> list[str]:
    parts = [("mlp", part) for part in ("weight", "scales", "zeros")]
    parts += [("attn", part) for part in ("qkv", "scales", "zeros")]
    return [f"model.layers.{n}.{'.'.join(part)}" for n in range(735) for part in parts]


@pytest.mark.parametrize(
    ("others", "trained"),
    [(beside_voices, TOWERS), (above_checkpoints, TOWERS[:2]), (quantised, TOWERS[:2])],
)
def test_any_third_of_any_tensor_gives_another_name(
    others: Callable[[Path], list[str]], trained: list[str], tmp_path: Path
) -> None:
    """Whatever the tensor is called, what lies beside it, and what was fused into it."""
    third = 3 << 15
    tensors, file = others(tmp_path), tmp_path / "model.safetensors"
    for number, tower in enumerate(TOWERS):
        tensors.insert(number * len(tensors) // len(TOWERS), tower)
    starts = write_holes(file, tensors, 3 * third)
    names = {name_of(tmp_path)}
    for name in (*trained, tensors[-1]):
        for start in range(starts[name], starts[name] + 3 * third, third):
            write_over(file, start, third)
            names.add(name_of(tmp_path))
            write_over(file, start, third, b"\0")
    assert len(names) == 3 * (len(trained) + 1) + 1


def test_any_edited_small_file_gives_another_name(model: Path) -> None:
    names = {name_of(model)}
    for name, content in SMALL.items():
        file = model / name
        file.write_text(content[::-1] + " ")
        names.add(name_of(model))
        file.write_text(content)
        file.rename(model / "renamed")
        names.add(name_of(model))
        (model / "renamed").rename(file)
    assert len(names) == 2 * len(SMALL) + 1


def test_times_places_links_and_what_describes_it_are_no_part_of_a_name(
    model: Path, tmp_path: Path
) -> None:
    copy, linked = tmp_path / "elsewhere" / "copy", tmp_path / "linked"
    shutil.copytree(model, copy)
    (copy / ".cache").mkdir()
    (copy / "step-5").mkdir()
    for name in SAYING_NOTHING:
        (copy / name).write_text("of one copy alone")
    for file in copy.rglob("*"):
        os.utime(file, (0, 0))
    linked.mkdir()
    for entry in model.iterdir():
        (linked / entry.name).symlink_to(entry)
    (tmp_path / "current").symlink_to(linked)
    (linked / "leads nowhere").symlink_to("nowhere")
    assert {name_of(each) for each in (copy, linked, tmp_path / "current")} == {name_of(model)}
    file = model / "model.safetensors"
    assert name_of(file) == name_of(copy / "model.safetensors")


def test_what_changes_while_it_is_read_has_no_name_yet(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "to be moved"
    link.symlink_to(model)
    (tmp_path / "current").symlink_to(link)
    every = [tmp_path, *tmp_path.rglob("*")]

    def newest_s() -> float:
        return max(each.lstat().st_ctime for each in every)

    before = newest_s()
    assert not changed(tmp_path / "current", before)
    config = model / "config.json"
    while config.stat().st_ctime <= before:  # the clock of the file system has steps
        os.utime(config, (before + 1e9, before + 1e9))
    assert changed(model, before)
    assert not changed(model, newest_s()), "a time that is still to come"

    before = newest_s()
    while newest_s() == before:
        link.unlink()
        link.symlink_to(model)
    assert changed(tmp_path / "current", before)
    assert not changed(model, before)

    before = newest_s()
    while model.stat().st_ctime <= before:
        model.rename(tmp_path / "other")
        (tmp_path / "other").rename(model)
    assert changed(model, before), "another directory may have been there"


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b"null",
        b'{"a": null}',
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": [0, 99999999]}}',
        b'{"a": {"data_offsets": [-9, 1e400]}}',
        b"[" * 100_000,
        b"\xff\xff",
    ],
)
def test_a_file_that_is_not_what_it_is_called_has_a_name(header: bytes, tmp_path: Path) -> None:
    """One by blocks that are spread over it."""
    file = tmp_path / "model.safetensors"
    names = set()
    for fill in (0, 1):
        content = len(header).to_bytes(8, "little") + header
        file.write_bytes(content.ljust(9 << 20, bytes([fill])))
        names.add(name_of(tmp_path))
    file.write_bytes(b"\xff" * (2 << 20))
    names.add(name_of(tmp_path))
    assert len(names) == 3 or header == b"{}"


def test_a_place_with_too_many_files_has_no_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "MAX_FILES", len(SMALL))
    with pytest.raises(Unnamed, match="more than"):
        digest_of(model, NEVER)


def test_of_20_gb_some_megabytes_are_read(tmp_path: Path) -> None:
    """Of four files of 5 GB of 500 tensors each, and of two large ones beside them."""
    for shard in range(4):
        tensors = [f"visual.blocks.{number}" for number in range(500)]
        write_holes(tmp_path / f"{shard}.safetensors", tensors, 10 << 20)
    for beside, begins in (("array.npy", b"\x93NUMPY"), ("model.gguf", b"GGUF")):
        (tmp_path / beside).write_bytes(begins)
        os.truncate(tmp_path / beside, 5 << 30)
    before = read_bytes()
    digest_of(tmp_path, NEVER)
    assert read_bytes() - before < 80 << 20


def test_of_many_experts_a_little_is_read_and_every_tensor_counts(tmp_path: Path) -> None:
    trained = []
    for shard in range(2):
        names = [f"model.layers.{n}.experts.{shard}.weight" for n in range(5000)]
        names.insert(2500, "visual.blocks")
        file = tmp_path / f"{shard}.safetensors"
        starts = write_holes(file, names, 1 << 18)
        trained += [(file, starts[name]) for name in (names[1], "visual.blocks", names[-1])]
    before = read_bytes()
    every = {name_of(tmp_path)}
    assert read_bytes() - before < 8 << 20, "10,000 times 512 bytes, and the headers"
    for file, start in trained:
        write_over(file, start, 1 << 18)
        every.add(name_of(tmp_path))
    assert len(every) == len(trained) + 1


def read_bytes() -> int:
    """What this process has read so far, from files or their cache (proc(5))."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


# -- the hub's cache -------------------------------------------------------------------------------


def put_blob(home: Path, name: str, content: bytes, large: bool) -> Path:
    as_git = hashlib.sha1(b"blob %d\0" % len(content) + content)
    key = hashlib.sha256(content).hexdigest() if large else as_git.hexdigest()
    blob, link = home / "blobs" / key, home / "snapshots" / COMMIT / name
    for each in (blob, link):
        each.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


@pytest.fixture
def snapshot(tmp_path: Path, model: Path) -> Path:
    home = tmp_path / "hub" / "models--some--model"
    for file in sorted(model.rglob("*")):
        if file.is_file():
            is_large = file.suffix in (".safetensors", ".model")
            name = file.relative_to(model).as_posix()
            put_blob(home, name, file.read_bytes(), is_large)
    return home / "snapshots" / COMMIT


def source_name(source: Path, since_s: float = NEVER) -> str:
    return Sources(since_s).name_of(str(source), None)[0]


def is_of_commit(source: Path) -> bool:
    return source_name(source).startswith(f"commit-{COMMIT}-")


def test_a_snapshot_has_the_name_of_its_commit(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / ".gitattributes").write_text("")
    name = source_name(snapshot)
    assert is_of_commit(snapshot)
    (tmp_path / "current").symlink_to(snapshot)
    assert source_name(tmp_path / "current") == name
    for file in (tmp_path / "hub").rglob("*"):
        os.utime(file, (0, 0), follow_symlinks=False)
    assert source_name(snapshot) == name
    shutil.copytree(tmp_path / "hub", tmp_path / "copy", symlinks=True)
    assert source_name(tmp_path / "copy" / snapshot.relative_to(tmp_path / "hub")) == name
    assert not is_of_commit(snapshot / "whisper"), "it is not all of the commit"


@pytest.mark.parametrize("name", SMALL)
def test_a_file_of_a_commit_that_is_not_there_counts(name: str, snapshot: Path) -> None:
    """A processor whose settings are not there takes others, and says nothing."""
    before = source_name(snapshot)
    (snapshot / name).unlink()
    assert is_of_commit(snapshot)
    assert source_name(snapshot) != before


def replace(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


def edit_blob(file: Path) -> None:
    stats = file.stat()
    file.write_bytes(file.read_bytes()[::-1] + b" ")
    os.utime(file, ns=(stats.st_atime_ns, stats.st_mtime_ns))


def lead_elsewhere(file: Path) -> None:
    other = file.parents[1] / "other"
    file.resolve().rename(other)
    file.unlink()
    file.symlink_to(other)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.model", "whisper/params"])
@pytest.mark.parametrize("spoil", [replace, edit_blob, lead_elsewhere])
def test_a_snapshot_with_a_file_that_is_not_the_hubs_is_a_directory(
    spoil: Callable[[Path], None], name: str, snapshot: Path
) -> None:
    spoil(snapshot / name)
    assert commit_of(snapshot) is None
    assert not is_of_commit(snapshot)


def write_through_the_link(file: Path) -> None:
    """As `cp -p` of older weights does."""
    save_file(tensors(), file.resolve())
    os.utime(file, (1e9, 1e9))


def write_and_forget_times(file: Path) -> None:
    save_file(tensors(), file.resolve())
    for each in file.parents[3].rglob("*"):
        os.utime(each, (0, 0), follow_symlinks=False)


def write_in_place(file: Path) -> None:
    save_file(tensors(), file.resolve())


@pytest.mark.parametrize("edit", [write_through_the_link, write_and_forget_times, write_in_place])
def test_edited_weights_of_a_snapshot_have_another_name(
    edit: Callable[[Path], None], snapshot: Path, tmp_path: Path
) -> None:
    """In a copy of the cache, too, whose times say nothing."""
    name = source_name(snapshot)
    edit(snapshot / "model.safetensors")
    edited = source_name(snapshot)
    shutil.copytree(tmp_path / "hub", tmp_path / "copy", symlinks=True)
    copied = source_name(tmp_path / "copy" / snapshot.relative_to(tmp_path / "hub"))
    assert name != edited == copied


def test_a_snapshot_may_be_downloaded_but_not_edited_while_an_engine_starts(
    snapshot: Path,
) -> None:
    file = snapshot / "model.safetensors"
    assert source_name(snapshot, since_s=0) == source_name(snapshot)
    linked_ns = file.lstat().st_ctime_ns
    while file.stat().st_ctime_ns <= linked_ns:  # the clock of the file system has steps
        edit_blob(file)
    with pytest.raises(Unnamed, match="changed"):
        source_name(snapshot, since_s=linked_ns / 1e9)
    assert is_of_commit(snapshot)


def test_what_was_added_to_a_snapshot_counts(snapshot: Path) -> None:
    (snapshot / "image_processor_config.json").write_text("{}")
    assert not is_of_commit(snapshot)
