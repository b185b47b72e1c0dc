"""``python -m qwen3tts_hw``: the command line."""

import sys

from qwen3tts_hw.cli import main

sys.exit(main())
