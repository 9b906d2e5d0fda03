"""On-demand communication for models that PyTorch's FSDP wraps, without OSDP(...).

    from osdp import odc
    from osdp.odc.fsdp import fsdp2     # or fsdp1

    odc.init()                          # after init_process_group
    fsdp2.patch_lazy_init(model)        # after fully_shard
    fsdp2.pre_minibatch_start(model)    # publishes parameters
    ...                                 # forward and backward, as often as each rank likes
    fsdp2.pre_optimizer_step(model)     # ranks synchronize; gradients are complete
    optimizer.step()
    fsdp2.stop()

See `docs/odc.md`.
"""

from osdp.odc.options import init, init_nvshmem

__all__ = ["init", "init_nvshmem"]
