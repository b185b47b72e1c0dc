"""Reference audio for voice cloning: taken in, cleaned up, and turned into a speaker embedding.

Knows no requests, prompts or routes; the codes of reference audio are the codec's affair.
"""
