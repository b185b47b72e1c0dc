"""A stand-in for pyACL, which comes with CANN: the one function that vllm-ascend imports from it."""
