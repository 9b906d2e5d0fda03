"""The public names of `osdp.training.trace_step` and of what it waits for."""

from osdp.plots import Moment, draw_memory
from osdp.training.trace_step import MEMORY_STEP, TRACE_STEP, Tracer, ready_folder, recorded
from runtime.failures.gloo_threads import let_gloo_end

__all__ = ["MEMORY_STEP", "TRACE_STEP", "Moment", "Tracer", "draw_memory", "let_gloo_end", "ready_folder", "recorded"]
