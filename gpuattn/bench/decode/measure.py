"""Whole generations beside other libraries: token ids in, token ids out, both on the host.

What is timed is ``Engine.translate`` and ``Engine.generate``, with the host, as a user calls them;
the weights are random. The engine has ``fixed_weights``, as all peers do, unless prompts are longer
than a page: their keys and values would be known from the call before.

Before that, on a part of the problem in float32, the engine's tokens must equal those of
``gpuattn.decode``. The first texts of what is timed, ours and the peers', are then scored again by
teacher forcing in float32: their mean log-probability must be near what the search said, and the
peers' near that of ours.
"""

import functools
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu
from gpuattn.bench import results, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.comparison import medians
from gpuattn.bench.decode.cases import BANNED, Decoding
from gpuattn.bench.peers import decode as peers
from gpuattn.bench.peers.timing import noting
from gpuattn.bench.samples import DTYPES
from gpuattn.cuda.power import PowerMeter
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.decode.beam import beam_search
from gpuattn.decode.sample import sample
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import Engine
from gpuattn.engine.pages import PAGE
from gpuattn.models import GPT2, TranslationModel
from gpuattn.nn.module import uninitialised
from gpuattn.runtime.device import card_memory

WARM_UPS = 3
CHECKED, CHECKED_TOKENS, CHECKED_PROMPT = 4, 16, 40  # texts of the check, tokens of each
NEAR = 1e-4  # difference of two scores in float32 that may order two texts either way
RESCORED = 8  # texts whose log-probability is checked
# of a token's mean log-probability: logits have 16 bits, and the means of sampled texts differ
LOGPROB_TOLERANCE, LOGPROB_SLACK = 0.05, 0.05  # relative; nats
METERED = 1.0  # seconds of repeated calls whose energy is read
LOGITS_STD, BIAS_STD = 1.5, 0.1
SEED = 0
OURS = "gpuattn"


# ---- models -------------------------------------------------------------------------------------


def random_model(case: Decoding, xp: ModuleType) -> Any:
    """Return the model of a case with random weights in its dtype, drawn on the device.

    Logits have a standard deviation of LOGITS_STD. The table of the embedding is also that of the
    output: with weights of norms near 1 the last token would come again and again, so they are
    normal too. Biases are not 0, so that a peer without them is noticed.
    """
    config, rng = case.config(), xp.random.default_rng(SEED)
    with uninitialised():
        model = (TranslationModel if case.translates else GPT2)(config).eval()
    for path, parameter in model.named_parameters():
        x = rng.standard_normal(parameter.shape, dtype=np.float32)
        if parameter.ndim == 2:
            table = parameter.shape[0] == config.table_rows
            x *= parameter.shape[1] ** -0.5 * (LOGITS_STD if table else 1)
            if table:
                x[config.vocab :] = 0
        elif path.endswith("bias"):
            x *= BIAS_STD
        parameter.data = x.astype(DTYPES[case.dtype])
    return model


def in_float32(model: Any, case: Decoding) -> Any:
    """Return a copy of a model of ``case`` in float32."""
    with uninitialised():
        copy = type(model)(case.config()).eval()
    for (_, theirs), (_, own) in zip(
        copy.named_parameters(), model.named_parameters(), strict=True
    ):
        theirs.data = own.data.astype(np.float32)
    return copy


class Subject:
    """The model that cases share: in their dtype, and in float32 for checks."""

    def __init__(self, case: Decoding, xp: ModuleType) -> None:
        self.case, self.xp = case, xp
        self.model = random_model(case, xp)
        self.exact = in_float32(self.model, case)
        self._engine = Engine(self.exact)
        self._checked: set = set()

    @property
    def bytes(self) -> int:
        """The bytes of the weights in their dtype."""
        return sum(parameter.data.nbytes for parameter in self.model.parameters())

    def check(self, case: Decoding) -> str:
        """Check tokens in float32 once for each search, and return in words what was checked.

        Raises AssertionError where the engine's differ from those of ``gpuattn.decode``.
        """
        key = case.beam, case.top_k, case.cache
        most = min(CHECKED_TOKENS, case.shape[2])
        texts = self._part(case)
        if key not in self._checked:
            limits = [most] * len(texts)
            found = generate(self._engine, case, texts, limits)
            wanted = by_reference(self.exact, case, texts, limits, kv_cache=True)
            for i, (own, other) in enumerate(zip(found, wanted, strict=True)):
                near = case.beam > 1 and abs(own.score - other.score) < NEAR
                if own.tokens != other.tokens and not near:
                    raise AssertionError(
                        f"text {i}: {own.tokens} ({own.score:.5g}), "
                        f"gpuattn.decode found {other.tokens} ({other.score:.5g})"
                    )
            self._checked.add(key)
        return f"{len(texts)} texts of {most} tokens as gpuattn.decode's, float32"

    def _part(self, case):
        """Return a few short texts of a case: sources of several lengths, prompts of one."""
        texts = case.texts()[:CHECKED]
        if not case.translates:
            return [text[:CHECKED_PROMPT] for text in texts]
        return [text[: max(1, len(text) * (i + 1) // len(texts))] for i, text in enumerate(texts)]

    def logprob(self, case: Decoding, texts: Sequence[Sequence[int]]) -> float:
        """Return the mean log-probability of a token of the first RESCORED texts, in float32.

        Raises AssertionError for texts of other lengths than the case asks for.
        """
        lengths = case.lengths()[1].tolist()
        if (found := [len(text) for text in texts]) != lengths:
            raise AssertionError(f"texts have {found[:4]}... tokens, asked for {lengths[:4]}...")
        pairs = list(zip(case.texts(), texts, strict=True))[:RESCORED]
        if case.translates:
            scores = [one[:-1] for one in self._engine.score(pairs)]  # without the end mark
        else:
            rows = self.xp.asarray([[*prompt, *text] for prompt, text in pairs], np.int32)
            whole = to_cpu(self.exact.log_probabilities(rows[:, :-1], rows[:, 1:]))
            scores = [one[-len(text) :] for one, (_, text) in zip(whole, pairs, strict=True)]
        return float(np.concatenate(scores).mean())


def generate(
    engine: Engine, case: Decoding, texts: Sequence[Sequence[int]], limits: Sequence[int]
) -> list[Hypothesis]:
    """Return the best text for each source or prompt, of exactly ``limits`` tokens."""
    if case.translates:
        search = {"bos": BOS, "eos": EOS, "banned": BANNED, "beam": case.beam}
        return [best[0] for best in engine.translate(texts, limits=limits, **search)]
    draws: dict[str, Any] = {"top_k": case.top_k} if case.top_k else {"temperature": 0}
    return engine.generate(texts, limits=limits, seed=SEED, **draws)


def by_reference(
    model: Any, case: Decoding, texts: Sequence[Sequence[int]], limits: Sequence[int],
    kv_cache: bool = False,
) -> list[Hypothesis]:  # fmt: skip
    """Return what ``generate`` does, by ``gpuattn.decode``. Prompts have one length."""
    xp, most = get_xp(model.parameters()[0].data), max(limits)
    if case.translates:
        stepper = model.stepper(model.pack(texts), most, case.beam, kv_cache)
        found = beam_search(
            stepper, bos=BOS, max_length=most, eos=EOS, banned=BANNED, beam=case.beam
        )
        return [best[0] for best in found]
    stepper = model.stepper(xp.asarray(texts, np.int32), most, kv_cache=kv_cache)
    return sample(
        stepper, bos=stepper.first_tokens, max_length=most, eos=None, seed=SEED,
        top_k=case.top_k or 1,
    )  # fmt: skip


# ---- the comparison -----------------------------------------------------------------------------


class Bench:
    """Measures cells one after the other; those of one model share its weights and peers."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._open = peers.Opened()

    def measure(
        self, cell: Cell, xp: ModuleType, ceilings: dict[str, float], impl: str | None = None,
        with_peers: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the row of results of a Cell; ``results.py`` describes its fields.

        Raises AssertionError for a wrong result.
        """
        subject = self._subject_of(cell.case, xp)
        names = cell.peers if with_peers and xp is not np else ()
        try:
            return _measured(cell, subject, self._open, names, ceilings)
        finally:
            self._open.end_cell()
            if xp is not np:
                xp.get_default_memory_pool().free_all_blocks()

    def _subject_of(self, case, xp):
        known, same = self._subject, ("model", "kv_heads", "dtype")
        if known is None or any(getattr(known.case, n) != getattr(case, n) for n in same):
            self.close()
            self._subject = Subject(case, xp)
        return self._subject

    def close(self) -> None:
        """Free the model and its peers."""
        self._subject = None
        self._open.close()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _measured(cell, subject, opened, names, ceilings):
    case, xp, refusals = cell.case, subject.xp, []
    row: dict[str, Any] = {"checked": subject.check(case), "logprobs": {}}
    before = _free(xp)
    fixed = case.translates or case.shape[1] <= PAGE
    engine = Engine(subject.model, notify=refusals.append, fixed_weights=fixed)
    texts, limits = case.texts(), case.lengths()[1].tolist()
    if case.cache:
        ours = functools.partial(generate, engine, case, texts, limits)
    else:
        ours = functools.partial(by_reference, subject.model, case, texts, limits)
    for _ in range(WARM_UPS if case.cache else 1):
        found = ours()
    peaks = {}
    if before is not None:
        peaks[OURS] = subject.bytes + before - xp.cuda.runtime.memGetInfo()[0]
    said = sum(text.score for text in found[:RESCORED]) / sum(map(len, _tokens(found)[:RESCORED]))
    own = row["logprobs"][OURS] = subject.logprob(case, _tokens(found))
    _check_logprob("the search's own", said, own)

    calls, missing = {OURS: ours}, {}
    for name in names:
        with noting(missing, name):
            peer = opened.peer(name, case, subject.model)
            row["logprobs"][name] = theirs = subject.logprob(case, peer.run())
            _check_logprob(name, theirs, own)
            calls[name] = peer.run
            if peer.peak_bytes:
                peaks[name] = peer.peak_bytes
    times = timing.alternate_calls(calls)
    if case.cache and case.workload != "B":
        first = functools.partial(generate, engine, case, texts, [1] * len(texts))
        for _ in range(WARM_UPS):
            first()
        times["first"] = timing.alternate_calls({"first": first})["first"]
    row |= _energy(ours, case, xp)
    row |= {"peak_bytes": peaks} if peaks else {}
    row |= {"no_graph": refusals[0]} if refusals else {}
    if beside := [name for name in calls if name in peers.OTHER_PROCESS]:
        row["other_process"] = beside
    return _row(cell, times, missing, ceilings, xp) | row


def _tokens(found):
    return [text.tokens for text in found]


def _check_logprob(name, found, wanted):
    """Raise AssertionError unless two means of log-probabilities are near each other."""
    if not abs(found - wanted) <= LOGPROB_TOLERANCE * abs(wanted) + LOGPROB_SLACK:
        raise AssertionError(
            f"{name}: a token's mean log-probability is {found:.4g}, it should be {wanted:.4g}"
        )


def _free(xp):
    """Return the free bytes of the GPU, besides what CuPy's pool has in store; None on NumPy."""
    return None if xp is np else card_memory()[0]


def _energy(call, case, xp):
    """Return {"joules_per_token"} of repeated calls; {} where the GPU does not tell."""
    if xp is np:
        return {}
    meter, calls = PowerMeter(), 0
    begun, before = time.perf_counter(), meter.read(now=True).joules
    if before is None:
        return {}
    while not calls or time.perf_counter() - begun < METERED:
        call()
        calls += 1
    spent = meter.read(now=True).joules - before
    return {"joules_per_token": spent / (calls * case.tokens)}


def _row(cell, times, missing, ceilings, xp):
    us, samples = medians(times)
    case, row = cell.case, {"op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction}
    reference = xp is np or not case.cache
    row |= {"impl": "reference" if reference else "engine", "us": us.pop(OURS)}
    row["samples_us"] = samples.pop(OURS)
    if "first" in us:
        first = us.pop("first")
        row |= {"first_token_us": first, "first_token_samples_us": samples.pop("first")}
        row["step_us"] = (row["us"] - first) / (case.shape[2] - 1)
    row |= {"peers": us, "peer_samples_us": samples, "peers_missing": missing}
    return results.rated(row, ceilings) | {"tokens_per_s": case.tokens / row["us"] * 1e6}
