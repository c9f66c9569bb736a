"""The Tensors of a module, looked for again only where something was replaced."""

import itertools
import operator

from gpuattn.autodiff.record import changed
from gpuattn.autodiff.tensor import Tensor
from gpuattn.nn.module import Module


class Tensors:
    """The Tensors inside ``module``, each once, for those who ask again and again.

    A later call looks for them only where an attribute or an element of a container was replaced
    since, added or removed. What was found is kept until then.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._attributes, self._containers = _Held(), _Held()
        self._mark: object = None  # ``changed.last`` when the attributes were looked at
        self._found: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        mark = changed.last  # read first: a later change has a later mark
        alike = mark is self._mark or self._attributes.are_alike()
        if self._mark is None or not (alike and self._containers.are_alike()):
            found: dict[int, Tensor] = {}
            attributes: list = []
            containers: list = []
            self._module._collect(found, attributes, containers)
            self._attributes, self._containers = _Held(attributes), _Held(containers)
            self._found = list(found.values())
        self._mark = mark
        return self._found


class _Held:
    """What some collections hold, to see whether they hold the same later."""

    def __init__(self, collections=()):
        self._collections = collections
        self._known = list(itertools.chain.from_iterable(collections))

    def are_alike(self):
        now = itertools.chain.from_iterable(self._collections)
        same = sum(map(len, self._collections)) == len(self._known)
        return same and all(map(operator.is_, now, self._known))
