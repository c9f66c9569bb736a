"""Training by the clock: the stages of a step, and the loss over time."""

import time
from collections.abc import Callable
from typing import Any

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.lecture.harness.say import Say
from gpuattn.runtime.device import batch_to


def translator(say: Say, layers: int, width: int, heads: int) -> tuple[Any, Any]:
    """Return a translation model on the device, and a packed batch of 8 sentences."""
    config = gpuattn.models.TranslationConfig(256, width, heads, (layers, layers), 4 * width, 0.0)
    pairs = [(words, words) for words in say.rng.integers(4, 256, (8, 16)).tolist()]
    (batch,) = PackedLoader(pairs, 256, 0).epoch(0)
    model = gpuattn.models.TranslationModel(config).to(device=say.device)
    return model, batch_to(batch, say.xp)


def stages(say: Say, model: Any, batch: Any) -> dict[str, float]:
    """Return the milliseconds of the stages of a step, of the second step.

    On a GPU a stage ends when all of its work has.
    """
    found, losses, optimizer = {}, [], gpuattn.optim.AdamW(model, lr=1e-3)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: losses.append(model.loss(batch)),
        "backward": lambda: losses.pop().backward(),
        "update": optimizer.step,
    }
    for _ in range(2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if say.device == "cuda":
                say.xp.cuda.Device().synchronize()
            found[name] = (time.perf_counter() - begin) * 1e3
    return found


def curve(
    say: Say, config: Any, data: Any, unseen: Any, batch: int,
    until: Callable[[int, float], bool],
) -> list[tuple[float, float]]:  # fmt: skip
    """Train a GPT-2 until ``until(updates, seconds)``; return [(seconds, loss of unseen texts)].

    ``data``, ``unseen``: texts with the token after the last one, integers (N, T + 1).
    """
    model = gpuattn.models.GPT2(config).to(device=say.device)
    optimizer = gpuattn.optim.AdamW(model, lr=1e-2)
    data, unseen = say.xp.asarray(data), say.xp.asarray(unseen)
    points, n, begin = [], 0, time.perf_counter()
    while not until(n, seconds := time.perf_counter() - begin):
        if n % 10 == 0:
            with gpuattn.no_grad():
                loss = model.loss(unseen[:, :-1], unseen[:, 1:])
            points.append((max(seconds, 1e-3), float(to_cpu(loss.data))))
        part = data[n * batch % (len(data) + 1 - batch) :][:batch]
        model.loss(part[:, :-1], part[:, 1:]).backward()
        optimizer.step()
        n += 1
    return points
