"""Collect wheels for `benchmarks/gpu.py` on a machine without a network that has PyTorch and what comes with it.

python benchmarks/gpu_wheels.py FOLDER [--python 3.12] [--machine x86_64] [--mib 64] [--more PACKAGE ...]

Each package is downloaded by itself, at the version of `constraints.txt` if there is one, for that version of Python
and that processor. This package's wheel and DeepSpeed's are built here; they serve every Python 3. DeepSpeed compiles
its kernels where it runs. Wheels of before stay unless another version takes their place.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = (
    *("annotated-types", "hjson", "iniconfig", "msgpack", "pluggy", "py-cpuinfo", "pydantic", "pydantic-core"),
    *("pytest", "pytest-xdist", "transformers", "typing-extensions", "typing-inspection"),
)
"""What an image with PyTorch often lacks, or has in an older version."""
DEEPSPEED = "deepspeed==0.19.8"
LIBC_VERSIONS = (17, 27, 28)
"""Minor versions of the C library's 2 that wheels are tagged with; pip takes only those that are named."""


def main() -> None:
    """Collect the wheels and print their sizes."""
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch)
        download(new, [*PACKAGES, *options.more], options.python, options.machine)
        build(new, str(ROOT), {})
        build(new, DEEPSPEED, {"DS_BUILD_OPS": "0"})
        for wheel in sorted(new.glob("*.whl")):
            for old in options.folder.glob(f"{wheel.name.split('-')[0]}-*.whl"):
                old.unlink()
            (options.folder / wheel.name).write_bytes(wheel.read_bytes())
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(options.folder.glob("*.whl"))}
    for name, nbytes in sizes.items():
        print(f"{nbytes / 2**20:7.2f} MiB  {name}")
    total = sum(sizes.values()) / 2**20
    print(f"{total:7.2f} MiB  {len(sizes)} wheels in {options.folder}")
    if total > options.mib:
        sys.exit(f"the wheels take {total:.2f} MiB, more than the limit of --mib {options.mib:g}: leave out some")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--python", default="3.12", help="version of Python on the other machine")
    parser.add_argument("--machine", default="x86_64", help="its processor, as `uname -m` prints it")
    parser.add_argument("--mib", type=float, default=64, help="largest size of all wheels together")
    parser.add_argument("--more", nargs="*", default=[], metavar="PACKAGE", help="further packages")
    return parser.parse_args()


def download(folder: Path, packages: list[str], python: str, machine: str) -> None:
    """Download wheels of packages, without what they depend on."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in LIBC_VERSIONS] + [f"manylinux2014_{machine}"]
    platforms = [part for tag in tags for part in ("--platform", tag)]
    for package in packages:
        run("download", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms,
            "--constraint", str(CONSTRAINTS), "--dest", str(folder), package)  # fmt: skip


def build(folder: Path, source: str, settings: dict[str, str]) -> None:
    """Build the wheel of a package."""
    run("wheel", "--wheel-dir", str(folder), source, settings=settings)


def run(command: str, *arguments: str, settings: dict[str, str] | None = None) -> None:
    """Run a command of pip on single packages."""
    whole = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments]
    subprocess.run(whole, check=True, env=os.environ | (settings or {}))


if __name__ == "__main__":
    main()
