"""From a user's wishes to the rows a talker reads: validation, tokenisation, prompt layout. Imports no torch."""

from __future__ import annotations
