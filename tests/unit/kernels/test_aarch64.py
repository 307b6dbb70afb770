"""The kernels for 64-bit ARM: built by a cross compiler where there is one, and run under QEMU where that is installed
(Debian: g++-aarch64-linux-gnu and qemu-user)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src/kvarn/kernels/cpu/csrc"
CHECK = ROOT / "tests/support/kernel_check.cpp"
NATIVE = platform.machine() == "aarch64"
COMPILER = os.environ.get("KVARN_AARCH64_CXX") or ("c++" if NATIVE else "aarch64-linux-gnu-g++")
FLAGS = "-std=c++17 -O2 -static -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wextra -Werror"
QUIET = "-Wno-ignored-attributes -Wno-psabi -Wno-maybe-uninitialized"  # as CMakeLists.txt does
FORMATS = 11

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kernel_check` for ARM, compiled without a warning."""
    made = tmp_path_factory.mktemp("aarch64") / "kernel_check"
    files = [SOURCE / "kernels.cpp", SOURCE / "parallel.cpp", CHECK]
    command = [COMPILER, *FLAGS.split(), *QUIET.split(), "-DKVARN_ISA=baseline", f"-I{SOURCE}", *files, "-o", made]
    subprocess.run(command, check=True)
    return made


def test_kernels_compile(program: Path) -> None:
    assert program.read_bytes()[18:20] == b"\xb7\x00"  # ELF machine: AArch64


def test_every_format_is_attended_to_like_in_double_precision(program: Path) -> None:
    runner = [] if NATIVE else [shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")]
    if None in runner:
        pytest.skip("qemu-aarch64 is not installed")
    ran = subprocess.run([*runner, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == FORMATS
