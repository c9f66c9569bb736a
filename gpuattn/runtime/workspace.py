"""The parameters, gradients and moments of a model, each in one flat buffer. What is frozen stays
outside of them.

Every parameter is a view of its slice. Its gradient is written into the same slice of the gradient
buffer, and the optimizer updates whole buffers, in two launches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import BFLOAT16, get_xp, import_cupy, is_array, is_floating, to_cpu, to_gpu
from gpuattn.autodiff import backward_pass, side_stream
from gpuattn.autodiff.record import edit
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import CheckpointError, GradientError, problem
from gpuattn.nn.module import Module
from gpuattn.ops.update.flat_update import DECAY_BLOCK
from gpuattn.runtime.buckets import Arrivals, buckets
from gpuattn.tensor_file import differences

ALIGN = 128  # elements that slices are aligned to: 256 bytes in 16 bits, one block of decay
TOTAL = 8192  # elements that the size is a multiple of: 16 KiB in 16 bits, for up to 64 ranks
DTYPES = {"float32": np.dtype("float32"), "float16": np.dtype("float16"), "bfloat16": BFLOAT16}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Slot(NamedTuple):
    """A parameter's slice of each flat buffer: elements ``start`` to ``stop``, as ``shape``."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Workspace:
    """The flat buffers of a module. Its parameters become views of them on construction.

    ``module``: ``named_parameters()`` yields (name, Tensor) in the order of construction, float32
    on any device. That order is the flat order, so gradients become ready from the end.
    ``device``: "numpy" or "cuda". ``dtype``: of parameters and activations: "float32", "float16" or
    "bfloat16". ``grad_dtype``: of the gradients, ``dtype`` unless given ("float32" when several
    micro-batches are summed).
    ``moments``: names of the float32 buffers that the optimizer needs, which become attributes.
    ``masters``: False for 16-bit parameters without them, whose updates are rounded stochastically.
    ``parts``: each bucket can be cut into so many equal pieces. ``part``: whose pieces ``masters``,
    ``moments`` and ``decay`` are held here, and those of the others elsewhere; None: all of them.

    Attributes, all flat arrays of ``size`` elements, or of a part of it: ``params``, in ``dtype``;
    ``masters``, float32, or the same array as ``params`` when these are float32 or have no masters;
    ``model``: ``params`` where they are a 16-bit copy, else None; ``grads``. ``decay``: uint8, one
    for every 128 elements: whether weight decay applies; it does not to parameters with fewer than
    two axes.
    ``slots``: {name: Slot}. ``tensors``: {name: Tensor}. ``frozen``: {name: array on the host}
    of Tensors without ``requires_grad``, which move to the device and, if of floats, the dtype.
    ``saved``: elements of a flat buffer in a file, whatever ``parts`` are. ``buckets``: slices of
    ``params`` and ``grads``, see ``runtime.buckets``; ``places``: for each the slice of ``masters``
    and the others that holds this part's piece of it, or the bucket. ``my_params``: for each a view
    of this part's piece of the 16-bit parameters, or of ``masters``. ``my_grads``: the gradients of
    these pieces side by side, or all.
    ``on_sync``: None, or a function that ``sync_model`` calls last, which brings the other parts of
    ``params``. ``initial``: the parameters on the host, (size,) float32, if only a part is held;
    set it to None to free it.

    Raises TypeError for parameters that are not float32, ValueError for an unknown dtype or device
    and for float16 without masters, DeviceMissingError for "cuda" without CuPy.
    """

    def __init__(
        self, module: Module, device: str = "numpy", dtype: str = "float32",
        grad_dtype: str | None = None, *, moments: Sequence[str] = MOMENTS, masters: bool = True,
        parts: int = 1, part: int | None = None,
    ) -> None:  # fmt: skip
        xp = _module(device)
        dtype, grad_dtype = _dtype("dtype", dtype), _dtype("grad_dtype", grad_dtype or dtype)
        self.tensors = dict(module.named_parameters())
        every = dict(getattr(module, "named_tensors", module.named_parameters)())
        frozen = {name: t for name, t in every.items() if name not in self.tensors}
        self.slots, self.size, self.saved = _layout(self.tensors, parts)
        self.buckets = buckets(self.slots, self.size, ALIGN * parts)
        self.places, self._pieces = _pieces(self.buckets, parts, part)
        self.on_sync: Callable[[], None] | None = None
        host = np.zeros(self.size, np.float32)
        decay = np.zeros(self.size // DECAY_BLOCK, np.uint8)
        for name, (start, stop, shape) in self.slots.items():
            host[start:stop] = to_cpu(self.tensors[name].data).ravel()
            if len(shape) >= 2 and self.tensors[name].requires_grad:
                decay[start // DECAY_BLOCK : -(-stop // DECAY_BLOCK)] = 1
        to_device = np.asarray if xp is np else to_gpu
        self.part, self.initial = part, None if part is None else host
        if dtype == np.float16 and not masters:
            raise ValueError(problem("Workspace", "masters", False, "True for float16"))
        whole = to_device(host)
        self.params = whole if dtype == np.float32 else whole.astype(dtype)
        self.masters, self.model = whole, None
        if not masters or dtype == np.float32:
            self.masters = self.params
        else:
            self.model = self.params
        if part is not None:
            self.masters = self.own_part(self.masters)
            decay = self.own_part(decay.repeat(DECAY_BLOCK))[::DECAY_BLOCK].copy()
        self.my_params = [
            self.masters[place] if self.model is None else self.model[piece]
            for place, piece in zip(self.places, self._pieces, strict=True)
        ]
        self.decay = to_device(decay)
        self.moments = tuple(moments)
        for name in self.moments:
            setattr(self, name, xp.zeros(self.masters.size, np.float32))
        self._views = self.slices(self.params)
        for name, data in self._views.items():
            self.tensors[name].data = data
        self.frozen = {name: to_cpu(tensor.data) for name, tensor in frozen.items()}
        for name, values in self.frozen.items():
            kind = dtype if is_floating(values.dtype) else values.dtype
            frozen[name].data = to_device(values).astype(kind, copy=False)
        self._tensors = self.tensors | frozen
        self.keep_gradients_in(grad_dtype)

    def keep_gradients_in(self, dtype: Any) -> None:
        """Replace the buffer of gradients by one in another dtype; their values are lost."""
        self.grads: Any = None
        self.my_grads: Any = None
        for tensor in self.tensors.values():  # views, which would keep the memory of the old one
            tensor.grad = tensor.grad_slot = None
        xp = get_xp(self.params)
        self.grads = xp.zeros(self.size, dtype)
        self.my_grads = self.grads if self.part is None else xp.zeros(self.masters.size, dtype)
        for name, slot in self.slices(self.grads).items():
            tensor = self.tensors[name]
            tensor.grad_started = False
            tensor.grad_slot = slot if tensor.requires_grad else None

    def own_part(self, flat: Any) -> Any:
        """Return a copy of what ``masters`` has of a flat buffer of all parameters."""
        own = get_xp(flat).empty(self.places[-1].stop, flat.dtype)
        for place, piece in zip(self.places, self._pieces, strict=True):
            own[place] = flat[piece]
        return own

    def slices(self, flat: Any) -> dict[str, Any]:
        """Return {name: view} of a flat buffer, each in the parameter's shape."""
        return {name: flat[a:b].reshape(shape) for name, (a, b, shape) in self.slots.items()}

    # ---- an update ----

    def begin(self) -> None:
        """Begin an update: the first gradient of each parameter overwrites, later ones add."""
        for tensor in self.tensors.values():
            tensor.grad, tensor.grad_started = None, False

    def backward(
        self, loss: Tensor, grad: Any = None,
        full: Callable[[int, Sequence[Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of ``loss`` into ``grads``, or add them to those since ``begin``.

        ``grad``: an array of the loss's shape that the gradients are multiplied by, such as the
        loss scale, or None for 1. ``full(i, events)``: called for each of the ``buckets``, in
        order, as soon as its gradients are final, once the current stream and ``events`` are
        reached; those that no loss has used are zero then. Raises GradientError for a loss that was
        not recorded.
        """
        if not loss.requires_grad:
            raise GradientError("backward: the loss was not recorded; compute it outside no_grad()")
        grad = get_xp(loss.data).ones_like(loss.data) if grad is None else grad
        with side_stream.enabled(self.grads):
            if full is None:
                backward_pass.backward(loss, grad)
                return
            members = self._members()

            def tell(i):
                full(i, side_stream.pending(members[i].values()))

            arrivals = Arrivals(members, tell)
            backward_pass.backward(loss, grad, on_ready=lambda tensor: arrivals.final(id(tensor)))
            for name in self.finish():
                self.tensors[name].grad_started = True
            arrivals.end()

    def _members(self):
        """Return {id of a Tensor: its slot} of the gradients in each bucket."""
        return [
            {
                id(self.tensors[name]): self.tensors[name].grad_slot
                for name, (start, stop, _) in self.slots.items()
                if start < bucket.stop and bucket.start < stop
                and self.tensors[name].grad_slot is not None
            }
            for bucket in self.buckets
        ]  # fmt: skip

    def idle(self) -> list[str]:
        """Return the names of parameters that no gradient has reached since ``begin``."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.grad_slot is not None and not tensor.grad_started
        ]

    def finish(self) -> list[str]:
        """Zero the gradients of parameters that the losses did not use; return their names."""
        idle = self.idle()
        for name in idle:
            self.tensors[name].grad_slot[...] = 0
        return idle

    def holds_parameters(self) -> bool:
        """Return whether the parameters are still views of these buffers."""
        return all(self.tensors[name].data is view for name, view in self._views.items())

    def sync_model(self) -> None:
        """Round the masters into the model's 16-bit parameters, if it has any; call ``on_sync``."""
        if self.model is not None:
            for place, mine in zip(self.places, self.my_params, strict=True):
                mine[...] = self.masters[place]
        if self.on_sync is not None:
            self.on_sync()

    def unusable_gradients(self) -> list[str]:
        """Return the names of parameters whose gradients hold inf or NaN. Synchronizes."""
        xp = get_xp(self.grads)
        slices = self.slices(self.grads)
        good = {name: xp.isfinite(g.astype(np.float32)).all() for name, g in slices.items()}
        return [name for name in good if not good[name]]

    # ---- checkpoints ----

    def buffers(self) -> dict[str, Any]:
        """Return {name: flat array} of what an exact continuation needs: masters and moments."""
        return {"masters": self.masters} | {name: getattr(self, name) for name in self.moments}

    def weights(self, masters: Any = None) -> dict[str, Any]:
        """Return {name: float32 array}: views of the masters, or copies where there are none; and
        what is frozen.

        ``masters``: a flat array to take in their place, such as a copy on the host.
        """
        weights = self.slices(self.masters if masters is None else masters)
        found = {name: view.astype(np.float32, copy=False) for name, view in weights.items()}
        return found | self.frozen

    def state_dict(self, buffers: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return {name: view} of ``buffers()``, or of copies of them, and of what is frozen.

        The masters have the names of parameters, a moment ``exp_avg`` is ``exp_avg:name``.
        """
        buffers = buffers or self.buffers()
        state = self.slices(buffers["masters"])
        for moment in self.moments:
            named = self.slices(buffers[moment])
            state |= {f"{moment}:{name}": view for name, view in named.items()}
        return state | self.frozen

    def load_state_dict(
        self, tensors: dict[str, Any], buffers: dict[str, Any] | None = None
    ) -> None:
        """Copy {name: array} of a ``state_dict`` into the buffers, all of it or nothing.

        ``buffers``: whole ones like ``buffers()``, to copy into instead of these.
        Raises CheckpointError that names what is missing, unknown, or of another shape or dtype.
        """
        state = self.state_dict(buffers)
        self._load(state, tensors, state)
        if buffers is None:
            self.sync_model()

    def load_weights(self, tensors: dict[str, Any]) -> None:
        """Copy {name: array} of ``weights`` into the buffers, all or nothing; moments stay.

        Raises CheckpointError as ``load_state_dict``.
        """
        self._load(self.slices(self.masters), tensors, self.weights())
        self.sync_model()

    def _load(self, own, tensors, expected):
        other = differences(expected, tensors)
        if other:
            raise CheckpointError(f"the checkpoint is of another model: {other}")
        for name, view in own.items():
            if name not in self.frozen:
                view[...] = get_xp(view).asarray(tensors[name])
        self.load_frozen({name: tensors[name] for name in self.frozen})

    def load_frozen(self, values: dict[str, Any]) -> None:
        """Set what is frozen to {name: array}."""
        for name, value in values.items():
            self.frozen[name] = np.array(to_cpu(value))
            there = get_xp(self.params).asarray(self.frozen[name])
            edit(self._tensors[name], ..., there)


def _module(device):
    if device == "numpy":
        return np
    if device == "cuda":
        return import_cupy()
    raise ValueError(problem("Workspace", "device", repr(device), "'numpy' or 'cuda'"))


def _dtype(argument, name):
    for dtype in DTYPES.values():
        if name in (dtype, str(dtype)):
            return dtype
    raise ValueError(problem("Workspace", argument, repr(name), ", ".join(DTYPES)))


def _pieces(buckets, parts, part):
    """Return (places, pieces): slices of buffers of a part, and those of whole ones that belong
    there, a pair for each bucket."""
    if part is None:
        return buckets, buckets
    places, pieces, at = [], [], 0
    for start, stop in ((bucket.start, bucket.stop) for bucket in buckets):
        each = (stop - start) // parts
        pieces.append(slice(start + part * each, start + (part + 1) * each))
        places.append(slice(at, at + each))
        at += each
    return places, pieces


def _layout(tensors, parts):
    """Return ({name: Slot}, size of the flat buffers, and of those in one part).

    Each part is a multiple of ALIGN.
    """
    slots, at = {}, 0
    for name, tensor in tensors.items():
        if not is_array(tensor.data) or tensor.data.dtype != np.float32:
            got = f"{type(tensor.data).__module__} {tensor.data.dtype}"
            raise TypeError(problem("Workspace", name, got, "a float32 parameter"))
        size = math.prod(tensor.data.shape)
        slots[name] = Slot(at, at + size, tensor.data.shape)
        at += -(-size // ALIGN) * ALIGN
    size, whole = (-(-at // unit) * unit for unit in (math.lcm(TOTAL, ALIGN * parts), TOTAL))
    return slots, size, whole
