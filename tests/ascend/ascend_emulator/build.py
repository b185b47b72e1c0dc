"""Compile the emulated AscendCL runtime and the operator layer for an environment that has torch and torch_npu.

The real torch_npu links against CANN, which is not here. Its undefined symbols are found with ``nm``: those that are
emulated come from ``native/*.cpp``, all others become stubs that answer "success" and are counted. The result is a
folder of shared libraries, kept in a cache under a name that changes with the sources and the installed versions.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

NATIVE = Path(__file__).resolve().parent / "native"
RUNTIME_SOURCES = ("streams.cpp", "graphs.cpp", "memory.cpp", "device.cpp")
RUNTIME_LIBRARY, OPERATOR_LIBRARY = "libascendcl.so", "libascend_emulator_ops.so"
CUDA_STUBS = "libascend_emulator_cuda.so"
CUDA_PARTS = ("cuda_runtime", "cuda_cupti")  # the two packages of CUDA that are small and therefore real
SYSTEM_LIBRARIES = (
    "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libc.so.6", "ld-linux-x86-64.so.2",
    "libdl.so.2", "librt.so.1", "libgomp.so.1",
)  # fmt: skip
SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
# Looked up by name while torch_npu runs, so the linker does not ask for them.
LOOKED_UP = (
    "aclrtSetDeviceSatMode", "aclrtSetOpExecuteTimeOut", "aclrtSetOpExecuteTimeOutV2", "aclrtSetOpWaitTimeout",
    "aclrtSetStreamFailureMode", "aclrtSetStreamOverflowSwitch", "aclrtGetStreamOverflowSwitch",
    "aclrtSetStreamAttribute", "aclrtCtxSetSysParamOpt", "aclrtSetSysParamOpt", "aclSetCompileopt", "aclprofSetConfig",
    "aclprofInit", "aclprofFinalize", "aclprofGetSupportedFeatures", "aclprofGetSupportedFeaturesV2",
    "aclrtUseStreamResInCurrentThread", "aclrtUnuseStreamResInCurrentThread", "aclrtSetStreamResLimit",
    "aclrtResetStreamResLimit", "aclrtSetDeviceResLimit", "aclrtResetDeviceResLimit", "aclrtGetLastError",
    "aclrtPeekAtLastError", "aclrtCmoAsync", "aclrtLaunchCallback", "aclrtSubscribeReport", "aclrtUnSubscribeReport",
)  # fmt: skip


class BuildError(Exception):
    """A compiler or tool failed; the message is its output."""


def build(site_packages: Path, cache: Path) -> Path:
    """Return the folder of libraries for the torch and torch_npu in ``site_packages``; compile what is not cached."""
    folder = cache / f"ascend-{_fingerprint(site_packages)}"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch_libraries = list((site_packages / "torch" / "lib").glob("*.so*"))
    if (site_packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        _stub_cuda(torch_libraries, site_packages, folder)
    _build_runtime(site_packages, torch_libraries, folder)
    _build_operators(site_packages, folder)
    vllm_ascend = list((site_packages / "vllm_ascend").glob("*.so"))
    if vllm_ascend:
        providers = [*torch_libraries, *(site_packages / "torch_npu" / "lib").glob("*.so"), *folder.glob("*.so")]
        _stub_library(vllm_ascend, providers, folder, name="libascend_emulator_vllm.so")
    (folder / "complete").touch()
    return folder


def library_path(site_packages: Path, folder: Path) -> str:
    """What LD_LIBRARY_PATH must be for a process that uses the libraries in ``folder``."""
    cuda = [site_packages / "nvidia" / part / "lib" for part in CUDA_PARTS]
    return os.pathsep.join(str(path) for path in (folder, *cuda) if path.exists())


def _stub_cuda(torch_libraries: Sequence[Path], site_packages: Path, folder: Path) -> None:
    """Stand in for the CUDA libraries of a torch that was built with CUDA: every call fails."""
    real = [path for part in CUDA_PARTS for path in (site_packages / "nvidia" / part / "lib").glob("*.so*")]
    symbols, libraries = missing(torch_libraries, real)
    source = folder / "cuda.c"
    source.write_text("".join(f"long {symbol}(void) {{ return 1; }}\n" for symbol in symbols))
    _compile("gcc", "-shared", "-w", str(source), "-o", str(folder / CUDA_STUBS), f"-Wl,-soname,{CUDA_STUBS}")
    for library in libraries:
        _empty_library(folder, library, CUDA_STUBS)


def _stub_library(targets: Sequence[Path], providers: Iterable[Path], folder: Path, *, name: str) -> None:
    """Write a library with all symbols that ``targets`` miss, and empty ones under the names that they ask for."""
    symbols, libraries = missing(targets, providers)
    source = folder / f"{name}.c"
    _write_stubs(source, symbols)
    _compile("gcc", "-shared", "-w", str(source), "-o", str(folder / name), f"-Wl,-soname,{name}", "-Wl,--no-as-needed",
             f"-L{folder}", "-lascendcl")  # fmt: skip
    for library in libraries:
        _empty_library(folder, library, name)


def _write_stubs(source: Path, symbols: Iterable[str]) -> None:
    lines = [f'long {symbol}(void) {{ return ascend_emulator_stub("{symbol}"); }}' for symbol in symbols]
    source.write_text("\n".join(["long ascend_emulator_stub(const char*);", *lines]) + "\n")


def missing(targets: Iterable[Path], providers: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Symbols that ``targets`` leave undefined and libraries they ask for, less what providers and the system have."""
    targets, present = list(targets), [*providers, *_system_libraries()]
    defined: set[str] = set()
    wanted: set[str] = set()
    libraries: set[str] = set()
    for path in targets:
        undefined, own = _symbols(path)
        wanted |= undefined
        defined |= own
        libraries |= _needed(path)
    for path in present:
        defined |= _symbols(path)[1]
    named = {path.name for path in (*targets, *present)}
    symbols = sorted(symbol for symbol in wanted - defined if not re.match(r"_?Py", symbol))
    return symbols, sorted(library for library in libraries - named if not library.startswith("libpython"))


def _fingerprint(site_packages: Path) -> str:
    digest = hashlib.sha256()
    for source in sorted((*NATIVE.iterdir(), Path(__file__))):
        digest.update(source.read_bytes())
    for pattern in ("torch-*.dist-info", "torch_npu-*.dist-info", "vllm_ascend-*.dist-info"):
        digest.update("".join(sorted(path.name for path in site_packages.glob(pattern))).encode())
    return digest.hexdigest()[:16]


def _build_runtime(site_packages: Path, torch_libraries: Sequence[Path], folder: Path) -> None:
    include = f"-I{site_packages}/torch_npu/include/third_party/acl/inc"
    objects = []
    for source in RUNTIME_SOURCES:
        target = folder / f"{source}.o"
        _compile("g++", "-std=c++17", "-c", str(NATIVE / source), include, "-o", str(target))
        objects.append(target)
    own = set().union(*(_symbols(path, dynamic=False)[1] for path in objects))
    symbols, libraries = missing((site_packages / "torch_npu").rglob("*.so"), torch_libraries)
    stubs = folder / "stubs.c"
    _write_stubs(stubs, sorted({*symbols, *LOOKED_UP} - own))
    _compile("gcc", "-w", "-c", str(stubs), "-o", f"{stubs}.o")
    linked = [*map(str, objects), f"{stubs}.o", "-o", str(folder / RUNTIME_LIBRARY)]
    _compile("g++", "-shared", *linked, f"-Wl,-soname,{RUNTIME_LIBRARY}")
    for library in libraries:
        if library != RUNTIME_LIBRARY:
            _empty_library(folder, library, RUNTIME_LIBRARY)


def _build_operators(site_packages: Path, folder: Path) -> None:
    torch, torch_npu = site_packages / "torch", site_packages / "torch_npu"
    headers = (
        torch / "include", torch / "include/torch/csrc/api/include", torch_npu / "include",
        torch_npu / "include/third_party/acl/inc",
    )  # fmt: skip
    libraries = (
        f"-L{torch}/lib",
        f"-L{torch_npu}/lib",
        f"-L{folder}",
        "-ltorch_npu",
        "-lc10",
        "-ltorch_cpu",
        "-lascendcl",
    )
    _compile(
        "g++", "-std=c++20", "-shared", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1", str(NATIVE / "ops.cpp"),
        *(f"-I{path}" for path in headers), "-o", str(folder / OPERATOR_LIBRARY), *libraries,
        "-Wl,--allow-shlib-undefined",
    )  # fmt: skip


def _empty_library(folder: Path, name: str, provider: str) -> None:
    """Make a library of this name that does nothing but load ``provider``."""
    empty = folder / "empty.c"
    empty.write_text("")
    _compile("gcc", "-shared", str(empty), "-o", str(folder / name), f"-Wl,-soname,{name}", "-Wl,--no-as-needed",
             f"-L{folder}", f"-l:{provider}")  # fmt: skip


def _compile(compiler: str, *arguments: str) -> None:
    command = [compiler, "-O1", "-fPIC", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{finished.stderr}")


def _symbols(path: Path, *, dynamic: bool = True) -> tuple[set[str], set[str]]:
    """Undefined and defined symbols of a library or object, without versions; weak undefined ones may stay so."""
    listing = subprocess.run(
        ["nm", *(["-D"] if dynamic else []), str(path)], capture_output=True, text=True, check=False
    )
    undefined, defined = set(), set()
    for line in listing.stdout.splitlines():
        *_, kind, name = line.split()
        if kind == "U":
            undefined.add(name.split("@")[0])
        elif kind not in ("w", "v"):
            defined.add(name.split("@")[0])
    return undefined, defined


def _needed(path: Path) -> set[str]:
    listing = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listing))


def _system_libraries() -> Sequence[Path]:
    found = []
    for name in SYSTEM_LIBRARIES:
        places = [Path(folder) / name for folder in SYSTEM_FOLDERS]
        found += [place for place in places if place.exists()][:1]
    return found


def default_cache() -> Path:
    """Where compiled libraries are kept: ASCEND_EMULATOR_CACHE, else the user's cache folder."""
    chosen = os.environ.get("ASCEND_EMULATOR_CACHE")
    return (
        Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ascend-emulator"
    )
