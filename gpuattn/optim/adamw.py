"""The optimizer of a flat workspace: two launches an update."""

from gpuattn.ops.adamw import AdamWState, adamw, gradient_statistics


class AdamW:
    """AdamW over the buffers of a workspace, on the device where they are.

    ``workspace``: has flat ``masters``, ``grads``, ``exp_avg``, ``exp_avg_sq``, a ``decay`` table,
    and ``model`` (the 16-bit parameters, or None); see ``gpuattn.train.workspace``.
    ``betas``, ``eps``, ``weight_decay``: as in ``gpuattn.ops.adamw.adamw``. ``max_norm``: clip the
    gradient's norm there, or None. ``loss_scale``, ``growth_interval``: where the loss scale starts
    and after how many clean updates it doubles (0: never moves).
    Raises ValueError for numbers out of range, at the first update.
    """

    def __init__(
        self,
        workspace,
        *,
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.0,
        max_norm=None,
        loss_scale=1.0,
        growth_interval=0,
    ):
        self.workspace = workspace
        self.statistics = {"max_norm": max_norm, "growth_interval": growth_interval}
        self.constants = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self.state = AdamWState(workspace.masters, loss_scale=loss_scale)

    def step(self, learning_rate, divisor=None):
        """Update the parameters from the gradients in the workspace, without waiting for it.

        ``divisor``: gradients are divided by it (the number of tokens they were summed over); None
        leaves what ``state.divisor`` holds, 1 unless set.
        """
        w, state = self.workspace, self.state
        state.learning_rate = learning_rate
        if divisor is not None:
            state.divisor = divisor
        gradient_statistics(w.grads, state, **self.statistics)
        buffers = (w.masters, w.grads, w.exp_avg, w.exp_avg_sq)
        adamw(*buffers, state, model=w.model, decay=w.decay, **self.constants)
