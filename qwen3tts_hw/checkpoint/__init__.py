"""Checkpoint directories: what they must hold, reading them safely, and writing random ones.

Knows files, names and shapes; not what the tensors compute. Importing it imports no torch.
"""

from __future__ import annotations
