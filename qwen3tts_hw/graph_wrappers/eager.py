"""Call the function as it is: the wrapper for devices without graphs, and the reference for those with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qwen3tts_hw.graph_wrappers.base import InputSpec, RowFunction, check_arguments, run_rows


class EagerWrapper:
    """Check arguments, count calls, and return clones, but pad and slice nothing; ``capture`` has nothing to do."""

    mode = "eager"

    def __init__(
        self, function: RowFunction, *, buckets: Sequence[int], inputs: Sequence[InputSpec], name: str = "function"
    ) -> None:
        self._function = function
        self._inputs = tuple(inputs)
        self._name = name
        self.counters: Counter[str] = Counter(calls=0, rows=0)

    def capture(self) -> None:
        """Return: nothing is recorded."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = check_arguments(self._name, self._inputs, tensors)
        self.counters.update(calls=1, rows=rows)
        # Cloned because a result may be a view of state that the next call writes.
        return tuple(result.clone() for result in run_rows(self._function, self._name, tensors))
