"""The two test beds of the emulated Ascend device, and how to run something in one.

``python tests/ascend/beds.py light -- python -m pytest tests/ascend/light``
``python tests/ascend/beds.py full -- vllm serve MODEL``

A bed is a virtual environment with the real torch_npu (in the full one also the real vLLM and vllm-ascend), a folder of
compiled emulator libraries, and the variables that make a process use both. It is made from nothing on first use; later
runs find it unchanged and start at once. Nothing here is verified on hardware.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from ascend_emulator import build  # noqa: E402  # found by the line above, as in the processes of a bed

TOOLS = ("pytest", "hypothesis", "numpy", "pyyaml", "decorator", "attrs", "psutil")
OWN = ("safetensors", "tokenizers", "tqdm", "huggingface_hub")
# What vLLM 0.23 imports on the way to a text model, without its packages for other devices and formats.
VLLM_NEEDS = (
    "regex", "cachetools", "sentencepiece", "requests", "blake3", "py-cpuinfo", "transformers==5.5.4",
    "protobuf>=5.29.6",
    "fastapi[standard]<0.137", "aiohttp", "openai>=2.0.0", "pydantic>=2.12.0", "prometheus_client",
    "prometheus-fastapi-instrumentator>=7.0.0", "pillow", "tiktoken", "lm-format-enforcer==0.11.3", "llguidance<1.8",
    "outlines_core==0.2.14", "diskcache==5.6.3", "lark==1.2.2", "xgrammar<1.0.0", "typing_extensions", "filelock",
    "partial-json-parser", "pyzmq", "msgspec", "gguf", "mistral_common[image]", "opencv-python-headless", "six",
    "setuptools<81", "einops", "cloudpickle", "watchfiles", "python-json-logger", "ninja", "pybase64", "cbor2", "ijson",
    "setproctitle", "openai-harmony", "model-hosting-container-standards<1.0.0", "opentelemetry-sdk",
    "opentelemetry-api", "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai", "numba==0.65.0",
    "sympy", "networkx", "jinja2", "fsspec", "scipy", "soundfile", "soxr",
)  # fmt: skip
STAMP = ".ascend-bed"


class BedError(Exception):
    """A bed could not be made; the message is for the user."""


@dataclass(frozen=True)
class Bed:
    """One environment: ``steps`` are argument lists of ``pip install``, run in order."""

    name: str
    steps: tuple[tuple[str, ...], ...]

    @property
    def home(self) -> Path:
        """The virtual environment: ASCEND_BED_<NAME>, else a folder beside the project's own environment."""
        chosen = os.environ.get(f"ASCEND_BED_{self.name.upper()}")
        return Path(chosen) if chosen else ROOT / f".venv-ascend-{self.name}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.home / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        return next((self.home / "lib").glob("python3.*")) / "site-packages"

    def fingerprint(self) -> str:
        """What decides its contents."""
        return hashlib.sha256(json.dumps([self.steps, sys.version_info[:2]]).encode()).hexdigest()


LIGHT = Bed("light", (("torch==2.13.0", *TOOLS, *OWN), ("--no-deps", "torch_npu==2.13.0")))
FULL = Bed(
    "full",
    (
        # From PyPI this torch is a CUDA build; without its dependencies it is one large file and two small ones.
        ("--no-deps", "torch==2.10.0", "torch_npu==2.10.0.post4", "nvidia-cuda-runtime-cu12==12.8.90",
         "nvidia-cuda-cupti-cu12==12.8.90"),
        (*TOOLS, *OWN, *VLLM_NEEDS),
        ("--no-deps", "torchvision==0.25.0", "torchaudio==2.10.0"),
        ("--no-deps", "vllm==0.23.0", "vllm-ascend==0.23.0", "compressed-tensors==0.17.0", "loguru"),
    ),
)  # fmt: skip
BEDS = {bed.name: bed for bed in (LIGHT, FULL)}


def prepare(bed: Bed, torch_index: str | None = None) -> Path:
    """Make the bed if it is not there yet; returns the folder of its emulator libraries."""
    stamp = bed.home / STAMP
    if not stamp.exists() or stamp.read_text() != bed.fingerprint():
        started = time.monotonic()
        _say(f"making the {bed.name} bed in {bed.home}")
        subprocess.run([sys.executable, "-m", "venv", str(bed.home)], check=True)
        for number, step in enumerate(bed.steps, start=1):
            _say(f"[{number}/{len(bed.steps)}] pip install {' '.join(step)[:100]}")
            extra = ["--extra-index-url", torch_index] if torch_index else []
            _pip(bed, "install", *step, *extra)
        if bed is FULL:
            _strip(bed)
        _install_project(bed)
        stamp.write_text(bed.fingerprint())
        _say(f"made in {time.monotonic() - started:.0f} s")
    return build.build(bed.site_packages, build.default_cache())


def variables(bed: Bed, libraries: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process in the bed."""
    paths = [str(ROOT), str(HERE), str(HERE / "site"), base.get("PYTHONPATH", "")]
    return {
        **base,
        "PATH": os.pathsep.join((str(bed.home / "bin"), base.get("PATH", ""))),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LD_LIBRARY_PATH": build.library_path(bed.site_packages, libraries),
        "ASCEND_EMULATOR_LIBRARIES": str(libraries),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",  # torch_npu's own launch thread; tasks are queued by the emulated runtime
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run(bed: Bed, command: Sequence[str], torch_index: str | None = None) -> int:
    """Run a command in the bed; returns its exit status."""
    libraries = prepare(bed, torch_index)
    return subprocess.run(list(command), env=variables(bed, libraries, os.environ), cwd=ROOT, check=False).returncode


def _pip(bed: Bed, *arguments: str) -> None:
    command = [str(bed.python), "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BedError(f"{' '.join(command)}\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}")


def _strip(bed: Bed) -> None:
    """Take out what cannot load without CUDA: vLLM's compiled kernels, and a Triton that would look for a driver."""
    for library in (bed.site_packages / "vllm").rglob("*.so"):
        library.unlink()
    _pip(bed, "uninstall", "-y", "triton")


def _install_project(bed: Bed) -> None:
    """Make the project's entry points known: in the light bed a path is enough, vLLM looks for metadata."""
    if bed is FULL:
        _pip(bed, "install", "--no-deps", "-e", str(ROOT))


def _say(text: str) -> None:
    sys.stdout.write(f"ascend bed: {text}\n")
    sys.stdout.flush()


def main() -> int:
    """Prepare a bed and, if a command is given, run it there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", choices=sorted(BEDS))
    parser.add_argument("--torch-index", help="package index to look for a CPU build of torch on")
    parser.add_argument("command", nargs="*", help="after --: what to run in the bed")
    options = parser.parse_args()
    try:
        if options.command:
            return run(BEDS[options.bed], options.command, options.torch_index)
        prepare(BEDS[options.bed], options.torch_index)
    except (BedError, build.BuildError) as error:
        sys.stderr.write(f"ascend bed: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
