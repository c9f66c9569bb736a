"""Deterministic greenlet scheduler for the numba-cuda simulator, with warp primitives."""

import types, threading, numpy as np
from greenlet import greenlet
from numba.cuda.simulator import kernelapi as K, api as A, kernel as KN

_cur = None


class _Thr:
    __slots__ = (
        "threadIdx",
        "blockIdx",
        "thread_id",
        "_manager",
        "g",
        "exc",
        "state",
        "key",
    )

    def syncthreads(s):
        s._manager._wait(s, ("block",))

    def _red(s, v, f):
        m = s._manager
        m._buf[s.thread_id] = v
        s.syncthreads()
        r = f(m._buf)
        s.syncthreads()
        return r

    def syncthreads_count(s, v):
        return s._red(v, lambda b: sum(1 for x in b if x))

    def syncthreads_and(s, v):
        return s._red(v, lambda b: 1 if all(b) else 0)

    def syncthreads_or(s, v):
        return s._red(v, lambda b: 1 if any(b) else 0)


class _Block:
    def __init__(s, f, grid_dim, block_dim, debug):
        s.f = f
        s._block_dim = block_dim
        s.n = int(np.prod(block_dim))

    def _wait(s, t, key):
        t.key = key
        s.g.switch(t)

    def run(s, point, *args):
        global _cur
        s.g = greenlet.getcurrent()
        s._buf = [None] * s.n
        s._ws = {}
        bx, by, bz = (list(s._block_dim) + [1, 1])[:3]
        thr = []
        for z in range(bz):
            for y in range(by):
                for x in range(bx):
                    t = _Thr()
                    t.threadIdx = K.Dim3(x, y, z)
                    t.blockIdx = K.Dim3(*point)
                    t.thread_id = x + bx * (y + by * z)
                    t._manager = s
                    t.key = None
                    t.g = greenlet(lambda: s.f(*args), s.g)
                    thr.append(t)
        ready = thr
        waiting = {}
        live = s.n
        prev = _cur
        try:
            while live:
                for t in ready:
                    _cur = t
                    try:
                        t.g.switch()
                    except Exception as e:
                        raise type(e)(
                            f"tid={list(t.threadIdx)} ctaid={list(t.blockIdx)}: {e}"
                        ).with_traceback(e.__traceback__) from None
                    if t.g.dead:
                        live -= 1
                        t.key = None
                    else:
                        waiting.setdefault(t.key, []).append(t)
                ready = []
                for key, ts in list(waiting.items()):
                    need = live if key[0] == "block" else bin(key[2]).count("1")
                    if len(ts) == need:
                        ready += ts
                        del waiting[key]
                if not ready and live:
                    raise RuntimeError(
                        "deadlock: "
                        + ", ".join(
                            f"{k} {len(v)} of {live if k[0] == 'block' else bin(k[2]).count('1')}"
                            for k, v in waiting.items()
                        )
                    )
        finally:
            _cur = prev


def _x(mask, val, pick):
    t = _cur
    m = t._manager
    wid, lane = divmod(t.thread_id, 32)
    full = (1 << min(32, m.n - wid * 32)) - 1
    mask = int(mask) & full
    if not (mask >> lane) & 1:
        raise RuntimeError("calling lane is not in the warp mask")
    buf = m._ws.setdefault((wid, mask), [None] * 32)
    buf[lane] = val
    m._wait(t, ("warp", wid, mask, 0))
    r = pick(buf, lane, mask)
    m._wait(t, ("warp", wid, mask, 1))
    return r


def _seg(l, w):
    return l // w * w


F = {}
F["shfl_sync"] = lambda self, m, v, s, w=32: _x(m, v, lambda b, l, _: b[_seg(l, w) + s % w])
F["shfl_up_sync"] = lambda self, m, v, d, w=32: _x(
    m, v, lambda b, l, _: b[l - d] if l - d >= _seg(l, w) else b[l]
)
F["shfl_down_sync"] = lambda self, m, v, d, w=32: _x(
    m, v, lambda b, l, _: b[l + d] if l + d < _seg(l, w) + w else b[l]
)
F["shfl_xor_sync"] = lambda self, m, v, x, w=32: _x(m, v, lambda b, l, _: b[l ^ x])
F["syncwarp"] = lambda self, m=0xFFFFFFFF: _x(m, None, lambda b, l, _: None)
F["ballot_sync"] = lambda self, m, p: _x(
    m, bool(p), lambda b, l, k: sum(1 << i for i in range(32) if (k >> i) & 1 and b[i])
)
F["all_sync"] = lambda self, m, p: _x(
    m, bool(p), lambda b, l, k: all(b[i] for i in range(32) if (k >> i) & 1)
)
F["any_sync"] = lambda self, m, p: _x(
    m, bool(p), lambda b, l, k: any(b[i] for i in range(32) if (k >> i) & 1)
)


def install():
    K.threading = types.SimpleNamespace(current_thread=lambda: _cur, Lock=threading.Lock)
    KN.BlockManager = _Block
    for n, f in F.items():
        if not hasattr(K.FakeCUDAModule, n):
            setattr(K.FakeCUDAModule, n, f)
    import numba.cuda as c

    _jit = A.jit
    ok = {
        "device",
        "debug",
        "argtypes",
        "inline",
        "restype",
        "fastmath",
        "link",
        "boundscheck",
        "opt",
        "cache",
        "shared_memory_carveout",
    }
    c.jit = lambda s=None, **kw: _jit(s, **{k: v for k, v in kw.items() if k in ok})
