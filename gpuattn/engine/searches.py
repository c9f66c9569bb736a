"""The searches of an engine, kept for reuse with the CUDA graphs of their steps."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from gpuattn.arrays import import_cupy, on_gpu
from gpuattn.modes import with_mode
from gpuattn.nn.tensors import Tensors
from gpuattn.runtime.graphs import Replays

MAX_TOKENS = 1 << 19  # cached tokens, beams x their room, of all searches
MEMORY_SHARE = 4  # one part in so many of a GPU's memory is for a search, at most: cached tokens,
# and copies of the weights in the form that its step reads

_address = attrgetter("data.data.ptr")


class Searches:
    """Searches by what they are for. One that is in use is nobody else's.

    A key begins with slots, beams and room, whose product is counted as cached tokens.
    ``notify(sentence)``: called with the reason where steps cannot be CUDA graphs. ``invariant``:
    ``Mode.batch_invariant`` of their launches. ``fixed``: whether the weights keep their values;
    their arrays are then held, and nobody looks whether others took their places. ``lock``: held
    while launches of searches are queued.
    """

    def __init__(
        self, model: Any, notify: Callable[[str], None], *, invariant: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self.model, self._tensors, self.lock = model, Tensors(model), threading.RLock()
        self._invariant, self._fixed = invariant, fixed
        self._held = [tensor.data for tensor in self._tensors()] if fixed else None
        self.kept: dict[tuple, Any] = {}
        self.used: list[tuple[tuple, Any]] = []  # keys and searches
        self.run: Any = lambda name, shape, step: step()
        self._stream: Any = None
        self._room = MAX_TOKENS  # of the device
        if on_gpu(model.parameters()[0].data):
            self._stream = import_cupy().cuda.Stream(non_blocking=True)
            with self._stream:
                self.run = Replays(notify)
            layers = getattr(model, "decoder", None) or model.layers
            own, size = layers[0].attention, model.parameters()[0].data.itemsize
            _, memory = import_cupy().cuda.runtime.memGetInfo()
            of_token = 2 * len(layers) * own.kv_heads * own.head_dim * size
            weights = sum(parameter.data.nbytes for parameter in model.parameters())
            self._room = max(0, memory // MEMORY_SHARE - weights) // of_token

    def most_tokens(self) -> int:
        """Return how many cached tokens all searches together may have."""
        return min(MAX_TOKENS, self._room)

    def fits(self, key: tuple) -> bool:
        """Return whether there is room for a search beside those in use; always for the first."""
        return not self.used or self._used_tokens() + self._tokens(key) <= self.most_tokens()

    def take(self, key: tuple, new: Callable[[], Any]) -> Any:
        """Return the search for ``key``, kept or made by ``new()``, for use until ``give``.

        Others that are kept make room for it, the oldest first. Graphs read parameters where they
        were at capture, so searches of replaced ones are dropped.
        """
        weights = self._weights()
        for other in [key for key, search in self.kept.items() if search.weights != weights]:
            self._forget(self.kept.pop(other))
        search = self.kept.pop(key, None)
        tokens = self._tokens(key) + self._used_tokens()
        while self.kept and tokens + sum(map(self._tokens, self.kept)) > self.most_tokens():
            self._forget(self.kept.pop(next(iter(self.kept))))
        if search is None:
            search = new()
            search.weights = weights
        search.refresh(changed=not self._fixed)
        self.used.append((key, search))
        return search

    def give(self, search: Any, keep: bool) -> None:
        """Take a search back. ``keep``: whether its state and graphs are sound."""
        (key,) = (key for key, other in self.used if other is search)
        self.used = [pair for pair in self.used if pair[1] is not search]
        if keep and key not in self.kept:  # ``take`` compares the weights
            self.kept[key] = search
        else:
            self._forget(search)

    @contextlib.contextmanager
    def lent(self, key: tuple, new: Callable[[], Any]) -> Iterator[Any]:
        """Return a context with what ``take`` returns, whose launches are behind those so far.

        It is kept afterwards, unless an error broke it.
        """
        with self.lock, self.on_stream(self.event()):
            search = self.take(key, new)
        sound = False
        try:
            yield search
            sound = True
        except GeneratorExit:  # a caller wants no more
            sound = True
            raise
        finally:
            with self.lock:
                self.give(search, keep=sound)

    def event(self) -> Any:
        """Return an event behind the work of the current stream; None on NumPy."""
        if self._stream is None:
            return None
        cuda = import_cupy().cuda
        return cuda.get_current_stream().record(cuda.Event(disable_timing=True))

    @contextlib.contextmanager
    def on_stream(self, *events: Any) -> Iterator[None]:
        """Return a context for launches of searches, behind ``events``."""
        stream = self._stream or contextlib.nullcontext()
        with with_mode("batch_invariant", self._invariant), stream:
            for event in events:
                if event is not None:
                    self._stream.wait_event(event)
            yield

    def _weights(self):
        """Return the addresses of the Tensors; none where they are fixed, and on NumPy, where no
        graph has them."""
        if self._stream is None or self._fixed:
            return ()
        return list(map(_address, self._tensors()))

    def _used_tokens(self):
        return sum(self._tokens(key) for key, _ in self.used)

    def _tokens(self, key):
        """Return the cached tokens of a search: texts that share pages may have more slots."""
        slots, beam, room, *_ = key
        return min(slots * beam * room, self.most_tokens())

    def _forget(self, search):
        """Let the memory of a search go, once no launch reads or writes it any more."""
        if self._stream is not None:
            self._wait()
            self.run.forget(lambda name, shape: shape[0] is search)

    def _wait(self):
        with contextlib.suppress(Exception):  # of a launch: who reads its results is told
            self._stream.synchronize()

    def __del__(self, ending=sys.is_finalizing):
        # a later stream may get this one's handle, and with it the memory of these searches
        if not ending() and getattr(self, "_stream", None) is not None:
            self._wait()
