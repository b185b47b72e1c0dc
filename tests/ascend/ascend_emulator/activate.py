"""Switch the emulator on in this process, right after torch_npu or a library with more operators is imported."""

from __future__ import annotations

from ascend_emulator import attention_kernels, layer, layer_kernels, rules

_active = False


def after_torch_npu() -> None:
    """Register reference kernels of torch_npu's own operators, state the rules, lay the emulator over everything."""
    global _active  # one switch per process
    if _active:
        return
    attention_kernels.register()
    layer_kernels.register()
    rules.register()
    layer.install()
    _active = True


def after_vllm_ascend_operators() -> None:
    """Do the same for the operators that vllm-ascend's compiled library adds."""
    from ascend_emulator import vllm_kernels

    after_torch_npu()
    vllm_kernels.register()
    layer.install()
