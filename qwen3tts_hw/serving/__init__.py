"""HTTP routes of the OpenAI speech interface, over any :class:`~qwen3tts_hw.engine.service.SpeechService`.

Owns the JSON shape of requests and errors, WAV and SSE framing, and the life of a request as its client sees it. Knows
neither vLLM nor torch. :func:`~qwen3tts_hw.serving.routes.create_router` is the door.
"""
