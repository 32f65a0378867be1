"""The kernel's bits are the same from every compiler and processor that is at hand here."""

import shutil
import subprocess
from pathlib import Path

import pytest

import patrickstar._kernels

pytestmark = pytest.mark.slow

SOURCES = Path(patrickstar._kernels.__file__).parent / "cpp"

BUILDS = {
    "g++": ("g++", []),
    "clang++": ("clang++", []),
    "g++ for aarch64": ("aarch64-linux-gnu-g++", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
}
"""A compiler, and what runs its programs where this machine is of another kind."""


def build(name: str, folder: Path) -> list[str]:
    """Build the kernel, and the program that prints its digests; returns the command that runs it."""
    compiler, runner = BUILDS[name]
    missing = [tool for tool in (compiler, *runner[:1], "cmake") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    elsewhere = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"] if runner else []
    output("cmake", "-S", SOURCES, "-B", folder, f"-DCMAKE_CXX_COMPILER={compiler}", *elsewhere)
    output("cmake", "--build", folder)
    program = folder / "digest"
    output(compiler, "-std=c++20", f"-I{SOURCES}", Path(__file__).parent / "digest.cpp", "-o", program, "-ldl")
    return [*runner, str(program), str(folder / "patrickstar_kernels.so")]


def output(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digests of the plainest loops, on one thread."""
    return output(*build("g++", tmp_path_factory.mktemp("plain")), "baseline", "1")


@pytest.mark.parametrize("name", BUILDS)
def test_the_same_bits(name, expected, tmp_path):
    command = build(name, tmp_path)
    variants = output(*command).split()
    assert "baseline" in variants
    for variant in variants:
        for threads in ("1", "3"):
            assert output(*command, variant, threads) == expected, (name, variant, threads)
