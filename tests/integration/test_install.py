"""What is installed: sdist and wheel in fresh environments, the image's lock, its Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from support.daemon import Daemon
from support.manifests import CHART, K8S, ROOT, build, containers, pods
from support.processes import child

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VARIANTS = "cpu", "cuda"


def lock(variant: str) -> Path:
    return DOCKER / f"requirements-{variant}.txt"


def pins(variant: str) -> dict[str, Requirement]:
    """What the image installs, by name."""
    pin = re.compile(r"^([\w.-]+==[^ \\]+(?: ; [^\\]+)?)", re.MULTILINE)
    found = pin.findall(lock(variant).read_text())
    return {pin.name: pin for pin in map(Requirement, found)}


def run(*command: str | Path, status: int = 0, **variables: str) -> str:
    """Run in an environment without this one's packages; what it wrote."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ECD_", "PYTHON"))}
    pipe = subprocess.PIPE
    with child(command, env=kept | variables, stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate()  # pip fetches: the test's own limit bounds it
    assert process.returncode == status, out + err
    return out + err


def installed(directory: Path, *commands: tuple[str | Path, ...]) -> Path:
    """The programs of a fresh environment in which pip has run these commands."""
    venv.create(directory, with_pip=True)
    for command in commands:
        run(directory / "bin" / "pip", "install", "-q", "--no-compile", *command)
    return directory / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of what the Dockerfile copies, and .dockerignore lets in."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    stage = DOCKERFILE.partition("\nFROM")[2].partition("\nFROM")[0]
    copied = {
        name.replace("${VARIANT}", "*")
        for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert copied == let_in
    checkout = tmp_path_factory.mktemp("checkout")
    for name in copied:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout)
    run(sys.executable, "-m", "build", "--outdir", checkout / "dist", checkout)
    [sdist] = (checkout / "dist").glob("*.tar.gz")
    [built] = (checkout / "dist").glob("*.whl")
    assert sdist.name == f"encoder_cache_daemon-{PROJECT['version']}.tar.gz"
    return built


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment that has the client alone."""
    return installed(tmp_path_factory.mktemp("client"), (wheel,))


def test_the_client_installs_by_itself(client: Path) -> None:
    assert run(client / "ecd-cli", "--version").strip() == PROJECT["version"]
    code = "import ecd_client, sys; assert not {'torch', 'mooncake'} & set(sys.modules)"
    run(client / "python", "-c", code)
    [line] = run(client / "ecd", "serve", status=1).splitlines()
    assert "the daemon is not installed here" in line
    run(client / "ecd-cli", "--address", "unix:///nowhere", "status", status=3)


def test_the_man_pages_are_installed_where_man_looks(client: Path) -> None:
    for page in "ecd.1", "ecd-cli.1":
        file = client.parent / "share" / "man" / "man1" / page
        assert run("groff", "-man", "-ww", "-z", file) == "", "each warning is a line"


def test_the_daemon_runs_on_what_the_image_installs(
    wheel: Path, client: Path, tmp_path: Path
) -> None:
    """As the Dockerfile does: what is locked, and then the wheel alone."""
    daemon_of = installed(
        tmp_path / "daemon", ("--require-hashes", "-r", lock("cpu")), ("--no-deps", wheel)
    )
    assert "No broken requirements found" in run(daemon_of / "pip", "check")
    assert run(daemon_of / "ecd", "--version").strip() == PROJECT["version"]
    daemon = Daemon(tmp_path, ECD_PEER_ADDRESS="127.0.95.1:9465", ECD_ENGINE_PORTS="29200-29215")
    daemon.command = ("env", "-u", "PYTHONPATH", str(daemon_of / "ecd"), "serve")
    try:
        daemon.start()
        told = run(client / "ecd-cli", "--address", daemon.address, "bench", "--rounds", "1")
        assert "put" in told
        assert PROJECT["version"] in run(client / "ecd-cli", "--address", daemon.address, "status")
    finally:
        daemon.close()


def required(name: str) -> Iterator[Requirement]:
    """What an extra of ours needs, with the extras that it names."""
    for text in PROJECT["optional-dependencies"][name]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from required(extra)
        elif requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            yield requirement


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lock_has_what_the_daemon_needs(variant: str) -> None:
    locked = pins(variant)
    needed = [*map(Requirement, PROJECT["dependencies"]), *required(variant)]
    for requirement in needed:
        [pin] = locked[requirement.name].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement}: run make lock"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_before_1_0_has_an_upper_bound(variant: str) -> None:
    """The next minor version of such a package may break what the last one promised."""
    locked = pins(variant)
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *required(variant)]:
        [pin] = locked[requirement.name].specifier
        if Version(pin.version).major == 0:
            assert any(bound.operator == "<" for bound in requirement.specifier), requirement


def test_every_locked_package_has_a_wheel_for_arm64(tmp_path: Path) -> None:
    plain = tmp_path / "requirements.txt"
    plain.write_text("\n".join({str(pin) for each in VARIANTS for pin in pins(each).values()}))
    manylinux = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 28)]
    options = "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:"
    platform = *manylinux, "--platform=manylinux2014_aarch64", "--python-version=3.11"
    pip = sys.executable, "-m", "pip", "install", "-q", *options, *platform
    run(*pip, "--target", tmp_path / "target", "-r", plain)


def test_every_version_is_that_of_the_package() -> None:
    version = PROJECT["version"]
    assert f'org.opencontainers.image.version="{version}"' in DOCKERFILE
    told = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert told["appVersion"] == version
    assert Version(told["version"]) == Version(version)
    assert "-" in told["version"] or not Version(version).is_prerelease, "SemVer writes 0.1.1-dev0"
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*")]
    tags = {
        (str(file.relative_to(ROOT)), tag)
        for file in files
        if file.is_file()
        for tag in re.findall(r"(?<![\w-])ecd(?::|, newTag: )(\d[\w.]*\w)", file.read_text())
    }
    assert len(tags) > 5
    assert {(file, tag) for file, tag in tags if tag != version} == set()


def test_the_image_is_what_the_manifests_expect() -> None:
    run(Path(sys.executable).with_name("hadolint"), DOCKER / "Dockerfile")
    user = re.search(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)
    assert user is not None
    assert f"--uid {user[1]} " in DOCKERFILE
    for overlay in ("daemonset", "sidecar", "example"):
        built = build(K8S / overlay)
        [ecd] = containers(built, "ecd")
        assert ecd["image"] == f"ecd:{PROJECT['version']}"
        for pod in pods(built):
            security = pod.get("securityContext", {})
            shared = {security.get("fsGroup"), *security.get("supplementalGroups", ())}
            own = {security.get("runAsUser")}
            if any(volume["name"] == "ecd" for volume in pod.get("volumes", ())):
                assert int(user[1]) in shared | own
