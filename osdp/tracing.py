"""The public name of `osdp.training.trace_step`."""

from osdp.training.trace_step import Moment, Tracer, draw_memory, ready_folder, recorded

__all__ = ["Moment", "Tracer", "draw_memory", "ready_folder", "recorded"]
