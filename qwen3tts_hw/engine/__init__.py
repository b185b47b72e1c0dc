"""The platform-neutral and vLLM-neutral engine: slot state, the frame step, audio streams, the local engine."""
