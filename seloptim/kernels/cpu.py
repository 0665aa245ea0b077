"""Builds, finds and loads cpu.cpp. The library is built for this machine's processor and kept in a cache.

The cache is the directory of the environment variable SELOPTIM_CACHE, else ~/.cache/seloptim. A file's name there has a hash
of all that it depends on, so that another torch, processor or version of the source never meets a stale one.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-Wno-psabi",
)
_loaded = False


def library() -> Path:
    """Where the built kernel is, or would be."""
    root = os.environ.get("SELOPTIM_CACHE")
    directory = Path(root) if root else Path.home() / ".cache" / "seloptim"
    return directory / f"cpu-{_key()}.so"


def available() -> bool:
    """Whether the kernel can be used without compiling; loads it if it is built.

    Example:
        >>> from seloptim import kernels
        >>> isinstance(kernels.available(), bool)
        True
    """
    if not _loaded and library().exists():
        _load_library()
    return _loaded


def load() -> None:
    """Load the kernel, built first if need be. Raises: as build()."""
    if not available():
        build()
        _load_library()


def build() -> Path:
    """Compile the kernel unless that is done; returns where it is. Processes that start at once wait for the first.

    Raises:
        RuntimeError: no C++ compiler, or one that fails; the message has its output.
    """
    target = library()
    if target.exists():
        return target
    compiler = _compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            fresh = Path(scratch) / target.name
            _compile(compiler, fresh)
            # A reader sees the whole file or none.
            os.replace(fresh, target)
    return target


def _load_library() -> None:
    global _loaded
    torch.ops.load_library(library())
    _loaded = True


def _compiler() -> list[str]:
    if sys.platform == "win32":
        raise RuntimeError("the native kernel is not available on Windows; use fused=None")
    given = os.environ.get("CXX")
    for name in [given] if given else ["c++", "g++", "clang++"]:
        words = name.split()
        if words and shutil.which(words[0]):
            return words
    wanted = f"the compiler that CXX names, {given!r}, was not found" if given else "no C++ compiler was found"
    raise RuntimeError(
        f"{wanted}; fused=True compiles its kernel once and needs g++ 11 or clang++ 14 or newer (Debian, Ubuntu: apt install g++; "
        "Fedora: dnf install gcc-c++; macOS: xcode-select --install; conda: conda install cxx-compiler), or use fused=None"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the kernel did not compile; use fused=None, or another compiler by the environment variable CXX. "
            f"The command was\n{' '.join(command)}\nand it said\n{done.stderr[-4000:]}"
        )


def _compile(compiler: list[str], target: Path) -> None:
    """Compile and link, in two commands.

    OpenMP is compiled in but not linked: its symbols then are those of torch's own library, already in the process. A second
    library would have a second pool of threads, which torch.set_num_threads does not reach. clang's symbols are other ones,
    which torch's library need not have: a kernel that clang compiled runs on one thread.
    """
    root = Path(torch.__file__).parent
    clang = "clang" in subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*FLAGS, f"-I{root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    objects = target.with_suffix(".o")
    _run([*compiler, *flags, *([] if clang else ["-fopenmp"]), "-c", str(SOURCE), "-o", str(objects)])
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([*compiler, "-shared", str(objects), *libraries, "-o", str(target)])


@functools.cache
def _key() -> str:
    parts = [torch.__version__, platform.system(), platform.machine(), *FLAGS, _processor()]
    return hashlib.sha256("\0".join(parts).encode() + SOURCE.read_bytes()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(found[name] for name in wanted if name in found)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock between processes that the system takes back from one that dies."""
    import fcntl  # not on Windows, whose compiler lacks the vector types that the kernel is written with

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
