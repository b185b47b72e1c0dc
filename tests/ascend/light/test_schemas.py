"""Every call of torch_npu in the package binds against what the installed torch_npu really has.

Operators: the attention ops are run with the dispatcher's operator replaced by one that binds its arguments to the real
schema. Python functions: the package's source is searched for calls on the torch_npu module, and each is bound to the
signature of the real object of that name.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import torch  # noqa: E402
from ascend_emulator import attention_kernels, layer_kernels  # noqa: E402
from ascend_emulator.reference import schemas  # noqa: E402

import qwen3tts_hw  # noqa: E402
from qwen3tts_hw.attention_ops import npu_fusion  # noqa: E402
from tests.ascend.light.device import backend  # noqa: E402

PACKAGE = Path(qwen3tts_hw.__file__).parent
FILES = ("backends/npu.py", "backends/base.py", "graph_wrappers/npu.py")
ROOTS = {
    "self._npu": torch_npu.npu,
    "self._module": torch_npu.npu,
    "self._torch_npu": torch_npu,
    "torch_npu": torch_npu,
}
KERNELS = ("npu_fusion_attention", "npu_fusion_attention_v3", "npu_fused_infer_attention_score")


class Binder:
    """In the place of an operator: bind the call to its real schema, strictly by name and type."""

    def __init__(self, name: str) -> None:
        self.schema = schemas()[f"npu::{name}"]
        self.calls = 0

    def __call__(self, *arguments, **options):
        known = {argument.name: argument for argument in self.schema.arguments}
        positional = [name for name, argument in known.items() if not argument.kwarg_only]
        assert len(arguments) <= len(positional)
        given = dict(zip(positional, arguments, strict=False))
        assert not given.keys() & options.keys()
        # Host lengths would be constants of a captured graph, to be updated before each replay. Ours has none.
        assert not any(name.startswith("actual_seq") for name in options)
        for name, value in {**given, **options}.items():
            assert name in known, f"{self.schema.name} has no argument {name}"
            assert _fits(value, str(known[name].type)), f"{name}={value!r} is no {known[name].type}"
        required = {name for name, argument in known.items() if not argument.has_default_value()}
        assert required <= given.keys() | options.keys()
        self.calls += 1
        return (arguments[0],)


def _fits(value, kind: str) -> bool:
    kinds = {"Tensor": torch.Tensor, "int": int, "float": float, "str": str, "bool": bool}
    return (value is None and "Optional" in kind) or isinstance(
        value, kinds[kind.removeprefix("Optional[").rstrip("]")]
    )


@pytest.mark.parametrize("lengths", [(1, 5), (4, 4)], ids=str)
@pytest.mark.parametrize("operator", KERNELS)
def test_attention_calls_bind_to_the_real_schema(monkeypatch, operator, lengths):
    device = backend("npu").device
    binder = Binder(operator)
    monkeypatch.setattr(torch.ops.npu, operator, binder, raising=False)
    op = npu_fusion.NpuFusionAttention(npu_fusion.load_kernel(operator, device), device, name=operator)
    query = torch.zeros(1, 4, lengths[0], 128, dtype=torch.bfloat16, device=device)
    key = torch.zeros(1, 2, lengths[1], 128, dtype=torch.bfloat16, device=device)
    op(query, key, key, scale=0.1)
    assert binder.calls == 1


def test_the_binder_can_fail():
    with pytest.raises(AssertionError, match="no argument sparse_modes"):
        Binder("npu_fusion_attention_v3")(*[torch.zeros(1)] * 3, 4, "BNSD", sparse_modes=2)


def calls():
    """``(file:line, real object, call)`` of each call on torch_npu in the package."""
    for name in FILES:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if not isinstance(node, ast.Call):
                continue
            path = ast.unparse(node.func)
            root = next((root for root in ROOTS if path.startswith(f"{root}.")), None)
            if root is not None:
                yield pytest.param(root, path.removeprefix(f"{root}."), node, id=f"{name}:{node.lineno} {path}")


@pytest.mark.parametrize(("root", "path", "node"), list(calls()))
def test_python_calls_bind_to_the_real_signature(root, path, node):
    target = ROOTS[root]
    for part in path.split("."):
        target = getattr(target, part)
    schema = schemas().get(f"npu::{path}")
    if schema is not None:
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        given = [argument.name for argument in positional[: len(node.args)]] + [one.arg for one in node.keywords]
        assert len(node.args) <= len(positional)
        assert len(set(given)) == len(given)
        assert set(given) <= {argument.name for argument in schema.arguments}
        assert {argument.name for argument in schema.arguments if not argument.has_default_value()} <= set(given)
        return
    try:
        signature = inspect.signature(target)
    except ValueError:
        pytest.skip(f"{path} is compiled and tells no signature")
    signature.bind(*[None for _ in node.args], **{keyword.arg: None for keyword in node.keywords if keyword.arg})


def test_torch_npu_is_called_nowhere_else():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text.startswith(("torch_npu.", "torch.npu.", "torch.ops.npu")) or text == "torch.npu":
                found.add(path.relative_to(PACKAGE).as_posix())
    # The second one asks for the version and for operators, which the tests above bind by their schema.
    assert found == {"backends/npu.py", "attention_ops/npu_fusion.py"}


def test_reference_kernels_are_of_operators_that_exist():
    known = schemas()
    missing = [
        f"{kernels.namespace}::{name}"
        for kernels in (attention_kernels.NPU, layer_kernels.NPU, layer_kernels.ATB)
        for name in kernels.kernels
        if f"{kernels.namespace}::{name}" not in known
    ]
    assert missing == []
