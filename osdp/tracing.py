"""The public name of `osdp.training.trace_step`."""

from osdp.plots import Moment, draw_memory
from osdp.training.trace_step import MEMORY_STEP, TRACE_STEP, Tracer, let_gloo_end, ready_folder, recorded

__all__ = ["MEMORY_STEP", "TRACE_STEP", "Moment", "Tracer", "draw_memory", "let_gloo_end", "ready_folder", "recorded"]
