"""Stand-ins for the Triton kernels on the dense text path of vLLM and vllm-ascend, in plain torch.

Without a Triton backend vLLM replaces ``triton.jit`` by a placeholder. Here the placeholder runs the stand-in of the
same name, and fails with the kernel's name if there is none. A stand-in is one operator of the emulated device: it is
queued, recorded and counted like any other. What the Triton compiler would make of the originals is not shown by this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

KERNELS: dict[str, Callable[..., None]] = {}
launches: Counter[str] = Counter()


class StandIn:
    """What ``@triton.jit`` gives: indexable by a grid, then callable with the kernel's arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            launches[self.__name__] += 1
            kernel = KERNELS.get(self.__name__)
            if kernel is None:
                place = f"{self.function.__module__}.{self.__name__}"
                raise NotImplementedError(f"[ascend emulator] the Triton kernel {place} has no stand-in")
            kernel(grid, *arguments, **options)

        return launch

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)


def stand_in(function: Callable[..., None]) -> Callable[..., None]:
    """Register a function under the name of the kernel that it stands in for."""
    KERNELS[function.__name__] = function
    return function


def replace_placeholder(module: ModuleType) -> None:
    """Make vLLM's Triton placeholder hand out stand-ins; ``module`` is vllm.triton_utils.importing."""
    placeholder = module.TritonPlaceholder
    original = placeholder.__init__

    def initialise(self: Any) -> None:
        original(self)

        def jit(*arguments: Any, **_: Any) -> Any:
            return StandIn(arguments[0]) if arguments and callable(arguments[0]) else StandIn

        self.jit = jit

    placeholder.__init__ = initialise


@stand_in
def _compute_slot_mapping_kernel(grid: Any, *arguments: Any, PAD_ID: int = -1, **_: Any) -> None:  # noqa: N803
    """One operator of the device, as the kernel is one launch; see :func:`slot_mapping`."""
    tokens, most, starts, positions, blocks, _stride, size, mapping = arguments
    sizes = [grid[0] - 1, tokens, most, size, PAD_ID]
    torch.ops.ascend_emulator.slot_mapping(sizes, starts, positions, blocks, mapping)


def slot_mapping(
    sizes: list[int],
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    mapping: torch.Tensor,
) -> None:
    """Cache slot of every token: its block in the request's table, and the place in the block."""
    requests, num_tokens, max_num_tokens, block_size, padding = sizes
    starts = query_start_loc[: requests + 1].long()
    total = int(starts[-1])
    owner = torch.repeat_interleave(torch.arange(requests), starts.diff())
    places = positions[:total].long()
    blocks = block_table[owner, places // block_size].to(mapping.dtype)
    mapping[:total] = blocks * block_size + (places % block_size).to(mapping.dtype)
    mapping[num_tokens:max_num_tokens] = padding


OPERATORS = torch.library.Library("ascend_emulator", "DEF")
OPERATORS.define(
    "slot_mapping(int[] sizes, Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a!) mapping) -> ()"
)
OPERATORS.impl("slot_mapping", slot_mapping, "CPU")
