"""From checkpoint names to the parameters of a module: what each tensor must look like and what becomes of it.

A slot is a shape and a function that stores a tensor of that shape, possibly transformed (split, projected,
reordered). The modules' own ``weights`` files know the names; this one knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen3tts_hw.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn

_LISTED_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One checkpoint tensor: its shape and what to do with it."""

    shape: tuple[int, ...]
    store: Callable[[Tensor], object]


@dataclass(slots=True)
class TensorSlots:
    """All checkpoint tensors of a module; ``folds`` run once every one has been stored."""

    slots: dict[str, TensorSlot] = field(default_factory=dict)
    folds: list[Callable[[], None]] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors."""
        return {name: slot.shape for name, slot in self.slots.items()}

    def tensor(self, name: str, target: Tensor) -> None:
        """Copy one checkpoint tensor into ``target``."""
        self.slots[name] = TensorSlot(tuple(target.shape), target.copy_)

    def parameters(self, prefix: str, module: nn.Module) -> None:
        """Copy every parameter of ``module`` under its own name."""
        for name, parameter in module.named_parameters():
            self.tensor(f"{prefix}.{name}", parameter)

    def parts(self, prefix: str, names: Iterable[str], fused: nn.Linear) -> None:
        """Fill the rows of one matrix from several checkpoint matrices of equal height."""
        names = tuple(names)
        for name, part in zip(names, fused.weight.chunk(len(names)), strict=True):
            self.tensor(f"{prefix}.{name}.weight", part)

    def load(self, tensors: Iterable[tuple[str, Tensor]], *, what: str, skip: Callable[[str], bool]) -> set[str]:
        """Store every tensor in its slot and return the names used; ``skip`` says which ones are of no concern.

        Raises CheckpointError with all that is missing, unknown or of another shape; ``what`` names the module there.
        """
        used: set[str] = set()
        problems: list[str] = []
        for name, tensor in tensors:
            if skip(name):
                continue
            slot = self.slots.get(name)
            if slot is None:
                problems.append(f"unknown tensor {name}")
                continue
            used.add(name)
            if tuple(tensor.shape) != slot.shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(slot.shape)}")
                continue
            slot.store(tensor)
        problems += [f"missing tensor {name}" for name in self.slots if name not in used]
        if problems:
            listed = "; ".join(problems[:_LISTED_PROBLEMS])
            more = f"; and {len(problems) - _LISTED_PROBLEMS} more" if len(problems) > _LISTED_PROBLEMS else ""
            raise CheckpointError(f"{what} weights do not match the configuration: {listed}{more}")
        for fold in self.folds:
            fold()
        return used
