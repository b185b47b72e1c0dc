"""Print the golden table of docs/parity.md: every stored case through the local engine, in float32 on the CPU.

    python scripts/golden_table.py

One Markdown row per case: frames, whether all codes equal the official package's, largest differences of hidden states
and samples. Takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qwen3tts_hw.engine.local import LocalEngine
from tests.parity.golden import cases, checkpoint_for


def main() -> int:
    """Print the table; 1 if a case differs in a code."""
    sys.stdout.write("| case | frames | ends by | codes | hidden | waveform |\n|---|---:|---|---|---:|---:|\n")
    equal = True
    engines: dict[Path, LocalEngine] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            directory = checkpoint_for(case, Path(folder))
            if directory not in engines:
                engines[directory] = LocalEngine.load(directory, device="cpu", dtype="float32")
            engine = engines[directory]
            result = engine.synthesize(case.request(engine.config), keep_hidden=True)
            same = np.array_equal(result.codes, case.arrays["codes"])
            equal = equal and same
            row = [case.id, str(len(result.codes)), result.finish_reason.value, "equal" if same else "**differ**"]
            if same and result.hidden is not None:
                row += [
                    f"{np.abs(result.hidden - case.arrays['hidden']).max():.1e}",
                    f"{np.abs(result.pcm - case.arrays['waveform']).max():.1e}",
                ]
            sys.stdout.write(f"| {' | '.join(row)} |\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
