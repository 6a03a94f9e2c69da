"""Resolves what `make setup` and its variants install, for each Python that is supported.

Nothing is installed, and only the package index is asked. `make check-constraints` runs it. It
fails where constraints/ lacks a version, where a version has no wheel for a Python, and where it is
not the build that the stack needs.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = "x86_64-manylinux_2_31"
"""The oldest glibc that every package has a wheel for. With an older one, uv would build llguidance
from source, which needs Rust."""
PLATFORMS = {"cpu": (LINUX,), "gpu": (LINUX,), "light": (LINUX, "aarch64-apple-darwin")}
"""Stack -> where it can be installed; every Mac of the last years is of the second kind."""
LIMIT_S = 300
_CUDA = re.compile(r"nvidia|cuda|triton")


def pins_of(*files: Path) -> dict[str, set[str]]:
    """Return name -> the versions that constraint files pin it to, one for each marker."""
    pins: dict[str, set[str]] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if found := re.match(r"([a-z0-9-]+)={2,3}([^ ;]+)", line):
                pins.setdefault(found[1], set()).add(found[2])
    return pins


def write_wheel(folder: Path, name: str, version: str, *, tag: str, needs: tuple[str, ...]) -> None:
    """Write a wheel that holds nothing but metadata."""
    stem = f"{name}-{version}"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        info = f"{stem}.dist-info"
        wheel.writestr(f"{info}/METADATA", "\n".join(("Metadata-Version: 2.1", *lines, "")))
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def write_torch_builds(folder: Path, torch: str, python: str) -> None:
    """Offer the CPU build of torch, which is not on the package index, and another CUDA build.

    The CPU set-up has to take the first and the CUDA set-up neither.
    """
    own = importlib.metadata.requires("torch") or []
    needs = tuple(need for need in own if not _CUDA.match(need) and "extra ==" not in need)
    version = python.replace(".", "")
    tag = f"cp{version}-cp{version}-manylinux_2_28_x86_64"
    for build in ("cpu", "cu126"):
        write_wheel(folder, "torch", f"{torch}+{build}", tag=tag, needs=needs)


def environment_needs() -> tuple[list[str], list[str]]:
    """Return (options, requirements) of the first-party environments, as `make environments` has.

    They are installed into .venv beside the stack, so they have to get along with its versions.
    """
    folder = ROOT / "packages/telescope-envs/environments"
    projects = [tomllib.loads(file.read_text()) for file in folder.glob("*/pyproject.toml")]
    needs = {need for project in projects for need in project["project"]["dependencies"]}
    sdists = re.search(r"--allow-sdist (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    options = [f"--no-binary={name}" for name in sdists[1].split(",")] if sdists else []
    return options, sorted(need for need in needs if not need.startswith("telescope-"))


def resolve(
    stack: str,
    python: str,
    links: Path,
    *,
    platform: str = LINUX,
    needs: Sequence[str] = (),
    options: Sequence[str] = (),
) -> tuple[dict[str, str], str]:
    """Return (name -> version that would be installed, what uv says where that fails).

    `needs` are further requirements, and `options` are of uv.
    """
    beside = links / "requirements.txt"
    beside.write_text("\n".join(needs), encoding="utf-8")
    command = [ROOT / "scripts/install_stack.sh", stack, "resolve"]
    command += ["--target", links / "target", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", platform]
    done = subprocess.run(
        [*map(str, command), *options],
        env={**os.environ, "UV_FIND_LINKS": str(links), "SETUP_BESIDE": str(beside)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        return {}, done.stderr[-2000:]
    # A project of this repository has a path in place of a version.
    return dict(re.findall(r"^ \+ ([a-z0-9-]+)==(\S+)$", done.stderr, re.MULTILINE)), ""


def faults(stack: str, found: dict[str, str]) -> list[str]:
    """Return what `constraints/` does not say about the versions that would be installed."""
    folder = ROOT / "constraints"
    pinned = "gpu" if stack == "gpu" else "cpu"
    pins = pins_of(folder / f"{pinned}.txt", folder / "dev.txt")
    missing = [f"{name}=={version}" for name, version in found.items() if name not in pins]
    other = [
        f"{name}=={version}, and constraints/{pinned}.txt has {sorted(pins[name])}"
        for name, version in found.items()
        if name in pins and version not in pins[name]
    ]
    told = [f"constraints/ has no line for {line}; add one" for line in missing]
    return [*told, *(f"would install {line}" for line in other)]


def check(stack: str, python: str, platform: str) -> list[str]:
    """Return what is wrong with the stack on this Python and platform."""
    torch = next(iter(pins_of(ROOT / "constraints/gpu.txt")["torch"]))
    with tempfile.TemporaryDirectory() as folder:
        write_torch_builds(Path(folder), torch, python)
        found, error = resolve(stack, python, Path(folder), platform=platform)
        if error:
            return [f"cannot be resolved with wheels alone: {error}"]
        options, needs = environment_needs()
        _, error = resolve(
            stack, python, Path(folder), platform=platform, needs=needs, options=options
        )
    if error:
        return [f"the first-party environments do not fit into it: {error}"]
    wanted = {"cpu": f"{torch}+cpu", "gpu": torch, "light": None}[stack]
    wrong = faults(stack, found)
    if found.get("torch") != wanted:
        wrong.append(f"expected torch {wanted}, got {found.get('torch')}")
    if stack == "light" and (heavy := sorted({"vllm", "ray", "transformers"} & set(found))):
        wrong.append(f"expected nothing of the trainer, got {', '.join(heavy)}")
    if not wrong:
        torch = found.get("torch", "not in it")
        print(f"{stack}, Python {python}, {platform}: {len(found)} wheels, torch {torch}")
    return wrong


def main() -> int:
    """Check every stack on every Python and platform; return the exit status."""
    status = 0
    for stack, platforms in PLATFORMS.items():
        for python in PYTHONS:
            for platform in platforms:
                for line in check(stack, python, platform):
                    print(f"{stack}, Python {python}, {platform}: {line}", file=sys.stderr)
                    status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
