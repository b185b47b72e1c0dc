"""The mixin over vLLM's V1 model runner: four hooks that hand its batches to the speech driver. No step logic here.

The hooks have the same meaning from vLLM 0.23 to 0.33 and in vllm-ascend 0.23; where signatures differ, arguments are
passed on as they come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qwen3tts_hw.vllm_plugin.driver import SpeechDriver


class SpeechRunnerMixin:
    """Speech hooks; precedes the platform's V1 runner in the MRO."""

    input_batch: Any
    speech: SpeechDriver | None = None
    _scheduled: Any = None

    def build_speech(self) -> SpeechDriver:
        """Make the driver over the loaded model; called once."""
        self.speech = SpeechDriver(self.get_model())  # type: ignore[attr-defined]  # every platform's runner has it
        self.speech.runner = "v1"
        return self.speech

    def _update_states(self, scheduler_output: Any) -> Any:
        """Requests come and go: free the slots of finished ones first, then admit the new."""
        driver = self.speech
        if driver is None:
            return super()._update_states(scheduler_output)  # type: ignore[misc]  # the runner follows in the MRO
        driver.finish(scheduler_output.finished_req_ids)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]  # as above
        for request in scheduler_output.scheduled_new_reqs:
            driver.admit(request)
        driver.preempted += len(scheduler_output.preempted_req_ids or ())
        self._scheduled = scheduler_output
        return result

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stage which slot each row belongs to, then run the talker."""
        if self._scheduled is not None and self.speech is not None:
            tokens = kwargs.get("input_ids")
            if tokens is None:
                tokens = next(value for value in args if torch.is_tensor(value))
            self._stage(self.speech, tokens.shape[0])
        return super()._model_forward(*args, **kwargs)  # type: ignore[misc]  # as above

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Profiling, capture and idle ranks."""
        if self.speech is not None:
            self.speech.stage_nothing()
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]  # as above

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Make the frames; vLLM gets codebook 0's token of each."""
        from vllm.v1.outputs import SamplerOutput

        tokens = None if self.speech is None else self.speech.sample(logits)
        if tokens is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]  # as above
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def _stage(self, driver: SpeechDriver, padded_rows: int) -> None:
        scheduled, batch = self._scheduled, self.input_batch
        self._scheduled = None
        count = batch.num_reqs
        request_ids = batch.req_ids[:count]
        if scheduled.total_num_scheduled_tokens == count:
            lengths = np.ones(count, dtype=np.int64)
        else:
            lengths = np.fromiter((scheduled.num_scheduled_tokens[name] for name in request_ids), np.int64, count)
        driver.stage(request_ids, lengths, batch.num_computed_tokens_cpu[:count], padded_rows)
