"""The peers of whole generations: a hand-made static step, transformers, CTranslate2.

All have our weights. A peer has ``run()``, which returns the new tokens of each text on the host,
and ``peak_bytes``: the most that PyTorch had allocated for it, and the weights; None if unknown.
"""

from typing import Any, NamedTuple

from gpuattn.arrays import to_cpu
from gpuattn.bench.decode.cases import CT2, GRAPH, HF, HF_STATIC, Decoding
from gpuattn.bench.peers import timing
from gpuattn.errors import UnsupportedError

OTHER_PROCESS = (CT2,)


class Peer(NamedTuple):
    """A generation of a peer; see above."""

    run: Any
    peak_bytes: int | None


class Opened:
    """The peers of one model, opened as they are asked for and kept for its other cases."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}
        self._names: set[str] = set()  # of all models so far

    def peer(self, name: str, case: Decoding, model: Any) -> Peer:
        """Return the peer ``name`` for a case of ``model``, after a first run.

        Raises UnsupportedError with the reason if it is missing, refuses, takes too long to
        compile, or runs out of memory.
        """
        self._names.add(case.model)
        if name == HF_STATIC and self._names != {case.model}:
            # behind a translation generate() ended the process by an illegal memory access
            raise UnsupportedError("it needs a process without other models: use --model")
        with timing.reasons(), timing.time_limit(name):
            if name == CT2:
                return self._of_process(case, model)
            torch = timing.torch_here()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run = self._call(name, case, model).run
            run()
            peak = torch.cuda.max_memory_allocated() - before
        return Peer(run, peak + sum(parameter.data.nbytes for parameter in model.parameters()))

    def _call(self, name, case, model):
        if name == GRAPH:
            from gpuattn.bench.peers.torch_decode import Named
            from gpuattn.bench.peers.torch_sampler import Sampler
            from gpuattn.bench.peers.torch_search import Translations

            new: Any = Translations if case.translates else Sampler
            return new(case, Named(tensors(model, case)), "cuda")
        if name not in (HF, HF_STATIC):
            raise UnsupportedError(f"no peer is called {name}")
        if HF not in self._models:
            try:
                from gpuattn.bench.peers.hugging_face import Model
            except ImportError as error:
                reason = f"transformers cannot be imported: {error}"
                raise UnsupportedError(reason) from error
            self._models[HF] = Model(case, tensors(model, case), "cuda")
        return self._models[HF].call(case, static=name == HF_STATIC)

    def _of_process(self, case, model):
        if CT2 not in self._models:
            from gpuattn.bench.peers.ctranslate2_process import Process

            weights = {
                name: to_cpu(parameter.data).astype("f4")
                for name, parameter in model.named_parameters()
            }
            self._models[CT2] = Process(case, weights, "cuda")
        try:
            call = self._models[CT2].call(case)
            call.run()
        except BaseException:  # an answer may still come: the process is of no more use
            self._models.pop(CT2).close()
            raise
        return Peer(call.run, None)

    def end_cell(self) -> None:
        """Free what the last cell alone needed."""
        timing.release()

    def close(self) -> None:
        """Free the peers of this model."""
        if CT2 in self._models:
            self._models[CT2].close()
        self._models.clear()
        timing.release()


def tensors(model: Any, case: Decoding) -> dict[str, Any]:
    """Return the parameters of a model on the GPU as tensors in the same memory."""
    return {
        name: timing.tensor(parameter.data, case.dtype)
        for name, parameter in model.named_parameters()
    }
