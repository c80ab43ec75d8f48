"""What a release publishes, built twice of one commit."""

from __future__ import annotations

import json
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.manifests import ROOT, tool
from support.processes import run

ENVIRONMENTS = ({"TZ": "UTC"}, {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("dist")
    script = ROOT / "deploy" / "dist.sh"
    made = [place / "one", place / "two"]
    for directory, environment, mask in zip(made, ENVIRONMENTS, ("022", "077"), strict=True):
        command = ["sh", "-c", f"umask {mask}; exec {script} {directory}"]
        done = run(command, capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture
def release(built: list[Path]) -> Path:
    return built[0]


def one(directory: Path, pattern: str) -> Path:
    [file] = directory.glob(pattern)
    return file


def test_another_build_writes_the_same_bytes(built: list[Path]) -> None:
    first, second = ({file.name: file.read_bytes() for file in made.iterdir()} for made in built)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built[0], check=True)
    summed = {line.split()[1] for line in first["SHA256SUMS"].decode().splitlines()}
    assert summed == first.keys() - {"SHA256SUMS"}


def test_each_file_has_the_commits_time_and_nobodys_name(release: Path) -> None:
    times = set()
    for archive in release.glob("*gz"):
        with tarfile.open(archive) as opened:
            times |= {member.mtime for member in opened}
    [time] = times
    stated = run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, check=True)
    assert time == int(stated.stdout)
    with tarfile.open(one(release, "encoder_cache_daemon-*.tar.gz")) as sdist:
        assert {(each.uid, each.gid, each.uname) for each in sdist} == {(0, 0, "")}


def test_sdist_wheel_and_chart_have_one_version(release: Path) -> None:
    version = one(release, "encoder_cache_daemon-*.tar.gz").name.split("-")[1][: -len(".tar.gz")]
    with zipfile.ZipFile(one(release, f"encoder_cache_daemon-{version}-*.whl")) as wheel:
        names = set(wheel.namelist())
    assert {"ecd/__main__.py", "ecd_client/vllm/__init__.py", "ecd_proto/v1/cache.proto"} <= names
    chart = one(release, "ecd-*.tgz")
    assert f"image: ecd:{version}" in tool("helm", "template", "ecd", chart)


def test_the_images_context_is_whole_and_its_lists_are_those_of_the_lock(release: Path) -> None:
    context = one(release, "ecd-image-*.tar.gz")
    with tarfile.open(context) as archive:
        files = {each.name: each for each in archive if each.isfile()}

        def text(name: str) -> str:
            read = archive.extractfile(files[name])
            assert read is not None
            return read.read().decode()

        for line in re.findall(
            r"^COPY (?!--)(.*)$", text("deploy/docker/Dockerfile"), re.MULTILINE
        ):
            for source in line.replace("${VARIANT}", "cuda").split()[:-1]:
                assert source in files or any(name.startswith(f"{source}/") for name in files)
        for variant in ("cpu", "cuda"):
            lock = text(f"deploy/docker/requirements-{variant}.txt")
            locked = set(re.findall(r"^([\w.-]+)==([^ ;\\]+)", lock, re.MULTILINE))
            bill = json.loads(one(release, f"ecd-image-*-{variant}.cdx.json").read_text())
            assert bill["bomFormat"] == "CycloneDX"
            assert {(each["name"], each["version"]) for each in bill["components"]} == locked
