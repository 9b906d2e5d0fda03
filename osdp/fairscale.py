"""The public name of `osdp.compat.fairscale`."""

from osdp.compat.fairscale import FSDP, Groups, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args

__all__ = ["FSDP", "Groups", "auto_wrap", "default_auto_wrap_policy", "enable_wrap", "gen_fsdp_args"]
