"""One training step: gradients of one or more batches, their statistics, the optimizer's update.

``gpuattn train`` runs this class, ``gpuattn bench train`` times it, and a program can use it alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from operator import call
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import problem
from gpuattn.gemm.tuning import tune
from gpuattn.nn.dropout import random_states
from gpuattn.nn.module import Module
from gpuattn.ops.scalars import add_product, product, take_mean
from gpuattn.runtime.cold_start import InBackground, rehearse
from gpuattn.runtime.feed import DeviceFeed, HostFeed
from gpuattn.runtime.graphs import Calls, Replays, warn


def _unchanged(batch: Any) -> Any:
    return batch


class TrainingStep:
    """Updates a model: each call computes the gradients of its batches and steps the optimizer.

    An update is the forward and backward pass of each batch, the statistics of the gradients
    (norm, clipping, inf and NaN, loss scale), the optimizer, and a moving average if there is one.
    On a GPU each batch is copied on a second stream while the step before runs, gradients and
    update are captured as CUDA graphs the second time that a shape comes, and a call does not
    synchronize. On NumPy, and with ``graphs=False``, the same functions run op by op. The bits are
    the same with and without graphs.

    ``model``: an ``nn.Module``. The step numbers the dropout of each batch, in all its layers.
    ``optimizer``: one of ``gpuattn.optim`` over a ``Workspace`` of the model. Device, dtypes,
    clipping and loss scale are theirs.
    ``loss(batch, dloss)``: returns the mean loss per target token of a batch on the device, a
    Tensor of shape (). ``dloss``: () float32, the loss scale times the weight of the batch, which
    backward begins with. ``model.loss`` and ``cross_entropy`` take it to compute the gradient in
    the memory of the logits; a loss may leave it unused.
    ``tokens``: target tokens of a full batch. A batch weighs its target tokens over these, near
    one, so that 16-bit gradients stay in range.
    ``average``: an ``optim.ExponentialAverage`` to update, or None.
    ``fixed_shape(batch)``: returns an equivalent batch with one of few shapes: each shape is a
    graph. ``graphs``: whether to use CUDA graphs. ``tuned``: whether matrix products time the
    algorithms that cuBLASLt proposes and use the fastest; False uses its first in every process.
    ``stream``: a CuPy stream; None makes one, so that nothing else waits for the step.
    ``notify(sentence)``: called with the reason where graphs do not work; by default it warns.
    ``exchange``: a ``parallel.exchange.Exchange`` of the optimizer, which sums the gradients over
    ranks in each update; None for one rank.

    Attributes: ``loss_sum``, () float32 on the device, the losses of all target tokens since
    ``clear_loss``, and ``loss_tokens``, how many these are. ``draws``: batches computed by calls.

    >>> import numpy as np
    >>> from gpuattn.data.batching import LanguageModelLoader
    >>> from gpuattn.models import GPT2, GPT2Config
    >>> from gpuattn.optim import AdamW
    >>> from gpuattn.runtime import TrainingStep, Workspace
    >>> model = GPT2(GPT2Config(vocab=10, d_model=16, heads=2, layers=1, block=8), seed=0)
    >>> workspace = Workspace(model)  # Workspace(model, "cuda", "bfloat16") on a GPU
    >>> optimizer = AdamW(workspace, weight_decay=0.01, max_norm=1.0)
    >>> def loss(batch, dloss):
    ...     return model.loss(batch.tokens, batch.labels, dloss, order=batch.order)
    >>> step = TrainingStep(model, optimizer, loss, tokens=4 * 8)
    >>> batches = LanguageModelLoader(np.arange(2000) % 10, block=8, batch=4, seed=0)
    >>> for batch in batches.epoch(0):
    ...     step(batch, learning_rate=0.01)
    >>> step.mean_loss() < 2.3  # of guessing: log(10)
    True
    """

    feed: Any  # HostFeed or DeviceFeed
    calls: Any  # Calls or Replays

    def __init__(
        self, model: Module, optimizer: Any, loss: Callable[[Any, Any], Tensor], *,
        tokens: int, average: Any = None,
        fixed_shape: Callable[[Any], Any] = _unchanged, graphs: bool = True, tuned: bool = True,
        stream: Any = None, notify: Callable[[str], None] = warn, exchange: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.average = model, optimizer, average
        self.exchange = exchange
        self.outer: Any = None  # a ``parallel.outer.Outer``, for files of the step's state
        self.workspace, self._loss_of = optimizer.workspace, loss
        self._random = random_states(model)
        self.xp = get_xp(self.workspace.params)
        self.stream = stream
        if self.xp is not np and stream is None:
            self.stream = self.xp.cuda.Stream(non_blocking=True)
        self._fixed_shape, self._graphs, self._notify = fixed_shape, graphs, notify
        self._first = tune if tuned else call
        self.loss_sum, self.loss_tokens = self.xp.zeros((), "float32"), 0
        self.draws = 0
        self.rebatch(tokens)

    def rebatch(self, tokens: int) -> None:
        """Count batches by ``tokens`` from now on; free the graphs and the buffers of batches.

        Raises ValueError for less than one token.
        """
        if tokens < 1:
            raise ValueError(problem("TrainingStep", "tokens", tokens, "1 or more"))
        self.tokens, self.update_tokens = tokens, 0
        self.feed = self.calls = None  # freed before the new ones are allocated
        if self.xp is np:
            self.feed, self.calls = HostFeed(), Calls(self._first)
            return
        with self.stream:
            self.feed = DeviceFeed(self._fixed_shape)
            agree = self.exchange.agree if self.exchange else None
            self.calls = (
                Replays(self._notify, self._first, agree) if self._graphs else Calls(self._first)
            )

    def __call__(self, *batches: Any, learning_rate: float) -> None:
        """Update the model once with the gradient of ``batches``, by the mean over their tokens.

        ``batches``: of ``gpuattn.data.batching`` on the host, or dataclasses like these: NumPy
        arrays of 32 bits, ``target_tokens``, and ``limits``, a tuple of what else a graph depends
        on. On a GPU the current stream waits for the update, and the update for what was queued.
        Raises TypeError for other batches, ValueError for none.
        """
        if not batches:
            raise ValueError(problem("TrainingStep", "batches", "none", "one or more"))
        for batch in batches:
            if not hasattr(batch, "target_tokens"):
                accepted = "a batch of gpuattn.data.batching, or one with target_tokens"
                raise TypeError(problem("TrainingStep", "batches", type(batch).__name__, accepted))
        with self.ordered():
            self.begin(learning_rate)
            for i, batch in enumerate(batches, 1):
                self.add(batch, self.draws, last=i == len(batches))
                self.draws += 1
            self.apply()

    def mean_loss(self) -> float:
        """Return the mean loss per target token since the last call, as a float. Synchronizes."""
        with self.ordered():
            mean = float(self.loss_sum) / max(self.loss_tokens, 1)
            self.clear_loss()
        return mean

    def take_loss(self) -> Any:
        """Return what ``mean_loss`` does, a float32 () array on the device."""
        mean = take_mean(self.loss_sum, max(self.loss_tokens, 1))
        self.loss_tokens = 0
        return mean

    def clear_loss(self) -> None:
        """Begin a new sum of losses."""
        self.loss_sum[...] = 0
        self.loss_tokens = 0

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Make the step's stream current in a block, in order with the stream that is current."""
        outside: Any = None if self.xp is np else self.xp.cuda.get_current_stream()
        if outside == self.stream:
            yield
            return
        self.stream.wait_event(outside.record())
        with self.stream:
            yield
        outside.wait_event(self.stream.record())

    # ---- the parts of an update, on the step's stream ----

    def begin(self, learning_rate: float) -> None:
        """Begin an update."""
        share = self.average.next_share() if self.average else 0
        self._numbers = {"learning_rate": learning_rate, "share": share}
        self._more, self._marked, self.update_tokens = False, False, 0

    def add(self, batch: Any, draw: int, last: bool = False) -> None:
        """Add the gradients of a batch to the update. ``draw``: numbers its dropout.

        ``last``: whether ``apply`` follows, and takes the gradients as this batch leaves them:
        what is final early goes to the other ranks early, where there are any.
        """
        self.update_tokens += batch.target_tokens
        self.feed.load(
            batch, weight=batch.target_tokens / self.tokens, tokens=batch.target_tokens, draw=draw,
            divisor=self.update_tokens / self.tokens, **self._numbers,
        )  # fmt: skip
        name = "more gradients" if self._more else "gradients"
        full = self.exchange.full if last and self.exchange else None
        if full is not None:
            name = f"last {name}"
        self.calls(name, self.feed.shape, functools.partial(self._gradients, self._more, full))
        self._more, self._marked = True, full is not None
        self.loss_tokens += batch.target_tokens

    def take(self) -> Any:
        """Return the flat gradients so far, to be summed with others; the next batch overwrites."""
        self.workspace.finish()
        self._more = False
        return self.workspace.grads

    def put(self, tokens: int) -> None:
        """Go on with the gradients that now stand where ``take`` was, a sum over ``tokens``: those
        of all ranks, where ``apply`` sums the gradients over them."""
        for tensor in self.workspace.tensors.values():
            tensor.grad_started = True
        self.update_tokens = tokens
        self.feed.numbers.divisor[...] = tokens / self.tokens

    def apply(self) -> None:
        """Update the parameters with the gradients of the batches since ``begin``.

        Those of all ranks, where there is an ``exchange``: all of them call it.
        """
        self._sum(self._marked)
        self.calls("update", None, self._apply, together=self.exchange is not None)

    def repeat(self) -> None:
        """Compute the gradients of the last batch and an update once more, op by op."""
        self._gradients(False)
        self._sum(marked=False)
        self._apply()

    def try_gradients(self, batch: Any, draw: int) -> None:
        """Compute the gradients of a batch to time them: the next update does not use them."""
        before = self.loss_sum.copy()
        weight = batch.target_tokens / self.tokens
        self.feed.load(batch, weight=weight, tokens=batch.target_tokens, draw=draw)
        self._gradients(False)
        self.loss_sum[...] = before

    def rehearse(self, batch: Any, more: bool = False) -> None:
        """Start to compile the kernels of an update by ``batch``: see ``cold_start.rehearse``.

        ``more``: of an update by several batches. For a step on a GPU, before the first update.
        """
        nothing = dict.fromkeys(("learning_rate", "share", "draw"), 0)
        tokens = batch.target_tokens
        self.feed.load(batch, weight=1, tokens=tokens, divisor=1, **nothing)
        update = InBackground(lambda: rehearse(self._apply))  # CuPy compiles kernels of both
        rehearse(functools.partial(self._gradients, False))
        if more:
            rehearse(functools.partial(self._gradients, True))
        update.wait()
        self.clear_loss()

    def _sum(self, marked):
        if self.exchange:
            self.workspace.finish()
            self.exchange.sum_gradients(marked)

    # The following functions become graphs: between calls nothing may differ in them except the
    # values in device memory.

    def _gradients(self, more: bool, full: Callable | None = None) -> None:
        """Write the gradients of the batch; with ``more`` add them to those of batches before.

        ``full``: as of ``Workspace.backward``.
        """
        numbers = self.feed.numbers
        if not more:
            self.workspace.begin()
        for random in self._random:
            random.step = numbers.draw.reshape(1)
        dloss = product(self.optimizer.state.field("loss_scale"), numbers.weight)
        loss = self._loss_of(self.feed.batch, dloss)
        self.workspace.backward(loss, dloss, full)
        add_product(self.loss_sum, loss.data, numbers.tokens)

    def _apply(self) -> None:
        numbers = self.feed.numbers
        self.workspace.finish()
        self.optimizer.update(numbers.learning_rate, numbers.divisor)
        if self.exchange:
            self.exchange.spread_parameters()
        if self.average:
            self.average.update(numbers.share)
