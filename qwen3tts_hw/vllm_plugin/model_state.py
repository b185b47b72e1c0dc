"""Model Runner V2: the same speech driver behind vLLM's ``ModelState`` and a sampler of ours.

A preempted request leaves the V2 runner and comes back as new; it keeps its slot, because only the runner mixin, which
sees the scheduler's output, says which requests are finished.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from qwen3tts_hw.vllm_plugin.driver import SpeechDriver


class SpeechModelState(DefaultModelState):
    """vLLM's per-model hooks; makes the driver, since the runner builds this object right after the model."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.driver = SpeechDriver(model)
        self.driver.runner = "v2"

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Give a request its slot, unless it comes back from preemption."""
        super().add_request(req_index, new_req_data)
        self.driver.admit(new_req_data)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Stage a real batch, or nothing for a dummy one."""
        inputs = super().prepare_inputs(input_batch, req_states)
        count = input_batch.num_reqs
        request_ids = list(input_batch.req_ids[:count])
        if count and all(self.driver.engine.holds(name) for name in request_ids):
            lengths = input_batch.num_scheduled_tokens[:count].astype("int64")
            computed = input_batch.num_computed_tokens_np[:count]
            self.driver.stage(request_ids, lengths, computed, input_batch.num_tokens_after_padding)
        else:
            self.driver.stage_nothing()
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Capture and dummy runs."""
        self.driver.stage_nothing()
        return super().prepare_dummy_inputs(num_reqs, num_tokens)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Wrap the runner's sampler."""
        return SpeechSampler(sampler, self.driver), None


class SpeechSampler:
    """The runner's own sampler, greedy and cheap with our parameters, whose tokens are replaced by the frame step's.

    Everything else it keeps (request states, staged writes, sample counts of prompt chunks) stays in use.
    """

    def __init__(self, sampler: Any, driver: SpeechDriver) -> None:
        self._sampler, self._driver = sampler, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample: vLLM's output object with our tokens."""
        output = self._sampler(logits, *args, **kwargs)
        tokens = self._driver.sample(logits)
        if tokens is not None:
            output.sampled_token_ids = tokens.to(output.sampled_token_ids.dtype)
        return output


class SpeechRunnerV2Mixin:
    """Tells finished requests from preempted ones; precedes vLLM's V2 runner in the MRO."""

    model_state: SpeechModelState

    def build_speech(self) -> SpeechDriver:
        """The driver that the model state made."""
        return self.model_state.driver

    def finish_requests(self, scheduler_output: Any) -> None:
        """Free the slots of finished requests; preempted ones keep theirs."""
        super().finish_requests(scheduler_output)  # type: ignore[misc]  # the runner follows in the MRO
        driver = self.model_state.driver
        driver.finish(scheduler_output.finished_req_ids)
        driver.preempted += len(scheduler_output.preempted_req_ids or ())
