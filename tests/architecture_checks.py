"""The rules that test_architecture.py enforces, each a function from a source tree to a list of violations.

Every check takes the tree's root, so that the tests can also run it on a planted violation. They read source text and
syntax trees and import nothing of the package, except ``torch_imports``, which starts fresh interpreters.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = "qwen3tts_hw"
SOURCE_FOLDERS = (PACKAGE, "tests", "benchmarks", "scripts", "examples")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Where a platform may be named: the three seams, and the two plugin files that pick vLLM's classes for a platform.
PLATFORM_FILES = (
    "backends/",
    "attention_ops/",
    "predictor_kernels/",
    "graph_wrappers/",
    "settings.py",  # the names of the attention ops that a user may choose
    "cli.py",  # the devices that a user may choose, the distributions that `doctor` looks for
    "vllm_plugin/workers.py",
    "vllm_plugin/platforms.py",
    "vllm_plugin/compat.py",
)
PLATFORM_WORD = re.compile(r"(?<![A-Za-z])(?i:cuda|npu|ascend)(?!ing|ed)|Cuda|CUDA|Npu|NPU(?!T)|Ascend")
VLLM_SPELLING = re.compile(r"(?i:cuda_?graph)\w*")  # vLLM's names for graph options, on every platform
TORCH_CUDA_FILES = ("backends/cuda.py", "graph_wrappers/cuda.py")

ENVIRONMENT_READERS = (
    "settings.py",
    "vllm_plugin/config_hook.py",  # these two read vLLM's own variables, to see what the user has decided already
    "vllm_plugin/platforms.py",
)

TORCH_FREE_MODULES = (
    "",
    "errors",
    "registry",
    "settings",
    "config",
    "encoder_config",
    "types",
    "voice.audio_input",
    "voice.cleanup",
    "prompt.request",
    "prompt.layout",
    "serving.schemas",
    "vllm_plugin",
)

# Words of other people's workshops, in pieces so that this file does not contain them.
FOREIGN_WORDS = (
    re.compile(r"(?<![\w=\"'.])(?i:ses" + r"sions?)\b(?!\()"),  # not an attribute, such as pytest's of a request
    re.compile(r"(?<!user-)(?<!user_)\b(?i:ag" + r"ents?)\b"),
    re.compile(r"(?<![\w.\-}])/(?:wo" + r"rk|ro" + r"ot)(?:/|\b)"),
    re.compile(r"(?i:\bsand" + r"box)"),
)
TEXT_SUFFIXES = ("", ".cfg", ".in", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """Relative path and text of each Python file below the folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def package_files(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Path inside the package and syntax tree of each of its modules."""
    for name, text in python_files(root, PACKAGE):
        yield name.removeprefix(f"{PACKAGE}/"), ast.parse(text)


def file_sizes(root: Path) -> list[str]:
    """Files longer than the limit."""
    counts = ((name, text.count("\n")) for name, text in python_files(root, *SOURCE_FOLDERS))
    return [f"{name}: {count} lines" for name, count in counts if count > MAX_FILE_LINES]


def function_sizes(root: Path) -> list[str]:
    """Functions longer than the limit."""
    found = []
    for name, text in python_files(root, *SOURCE_FOLDERS):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function) and (count := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {count} lines")
    return found


def module_docstrings(root: Path) -> list[str]:
    """Modules that do not say what they are."""
    return [name for name, text in python_files(root, *SOURCE_FOLDERS) if not ast.get_docstring(ast.parse(text))]


def platform_words(root: Path) -> list[str]:
    """Names and strings of the code that name a platform outside the seams; comments and docstrings may."""
    found = []
    for name, tree in package_files(root):
        if name.startswith(PLATFORM_FILES):
            continue
        for line, word in code_words(tree):
            shown = VLLM_SPELLING.sub("", word) if name.startswith("vllm_plugin/") else word
            if PLATFORM_WORD.search(shown):
                found.append(f"{name}:{line}: {word!r}")
    return found


def code_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier and string constant that is not a docstring, with its line."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value


def torch_cuda_uses(root: Path) -> list[str]:
    """Uses of ``torch.cuda`` outside the two files that own it."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in package_files(root)
        if name not in TORCH_CUDA_FILES
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    ]


def environment_reads(root: Path) -> list[str]:
    """Reads of the environment outside the modules that are its declared home."""
    found = []
    for name, tree in package_files(root):
        if name in ENVIRONMENT_READERS:
            continue
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if attribute or (imported and names & {"environ", "getenv"}):
                found.append(f"{name}:{getattr(node, 'lineno', 0)}")
    return found


def prints(root: Path) -> list[str]:
    """Calls of ``print`` in the package."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in package_files(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def unsafe_loading(root: Path) -> list[str]:
    """Readers that can execute what they read: pickle and what is built on it."""
    found = []
    for name, text in python_files(root, *SOURCE_FOLDERS):
        for node in ast.walk(ast.parse(text)):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            load = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            if load or any(module.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal") for module in modules):
                found.append(f"{name}:{getattr(node, 'lineno', 0)}")
    return found


def foreign_words(root: Path) -> list[str]:
    """Text that speaks of how or where the project was made instead of the project."""
    found = []
    for path in tracked_files(root):
        if path.suffix not in TEXT_SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if any(pattern.search(line) for pattern in FOREIGN_WORDS):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    return found


def tracked_files(root: Path) -> list[Path]:
    """Files under version control; all files where the tree is not a checkout."""
    answer = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if answer.returncode == 0 and answer.stdout:
        return [root / name for name in answer.stdout.split("\0") if name]
    return sorted(path for path in root.rglob("*") if path.is_file())


def export_lists(root: Path) -> list[str]:
    """``__all__`` lists that are unsorted, name something undefined, or leave out a public definition."""
    found = []
    for name, tree in package_files(root):
        listed = export_list(tree)
        if listed is None:
            continue
        if listed != sorted(listed, key=export_order):
            found.append(f"{name}: __all__ is not sorted")
        defined = set(top_level_names(tree))
        dynamic = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        if not dynamic:
            found += [f"{name}: __all__ names {word!r}, which is not there" for word in sorted(set(listed) - defined)]
        public = {
            node.name
            for node in tree.body
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        }
        found += [f"{name}: __all__ leaves out {word!r}" for word in sorted(public - set(listed))]
    return found


def export_list(tree: ast.Module) -> list[str] | None:
    """The literal value of ``__all__``, or None where a module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def export_order(word: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff's RUF022 asks for."""
    return (0 if word.isupper() else 1 if word[:1].isupper() else 2, word)


def top_level_names(tree: ast.Module) -> Iterator[str]:
    """Names that the module's top level defines or imports, also under ``if TYPE_CHECKING``."""
    for statement in tree.body:
        for node in [statement, *(statement.body if isinstance(statement, ast.If | ast.Try) else [])]:
            if isinstance(node, Function | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def torch_imports(root: Path, modules: tuple[str, ...] = TORCH_FREE_MODULES) -> list[str]:
    """Modules that are meant to be cheap but load torch, or do not import at all."""
    names = [f"{PACKAGE}.{module}".rstrip(".") for module in modules]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    command = [sys.executable, "-c", script, *names]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return [answer.stderr.strip().splitlines()[-1]] if answer.returncode else []


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    check.__name__: check
    for check in (
        file_sizes,
        function_sizes,
        module_docstrings,
        platform_words,
        torch_cuda_uses,
        environment_reads,
        prints,
        unsafe_loading,
        foreign_words,
        export_lists,
        torch_imports,
    )
}
