"""Loading a language model of 1.1 B parameters from a Hugging Face folder: seconds, host memory.

    python examples/benchmarks/loading.py --json loading.json

Writes a Llama of the sizes of TinyLlama, with random bfloat16 weights, to a temporary folder. Its
2.2 GB are then in the file cache. Each sample is one ``load_pretrained`` in a process of its own,
after CUDA has started, whose seconds are given apart. Host memory is the peak of the process minus
what it had before the call. The weights must have the bits of the file.

Required: 3 s, and host memory of the largest tensor and 200 MB.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import gpuattn
from gpuattn.arrays import BFLOAT16
from gpuattn.bench.results import origin
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.nn.module import uninitialised
from gpuattn.pretrained import files
from gpuattn.pretrained.architecture import ARCHITECTURES
from gpuattn.pretrained.folder import tensors_of
from gpuattn.runtime.cold_start import start_libraries
from gpuattn.runtime.device import array_module, choose_device
from gpuattn.tensor_file import has_bits_of

SECONDS, MORE_BYTES = 3, 200_000_000  # required
SIZES = {"vocab": 32_000, "d_model": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn": 5632}
SMALL = {"vocab": 640, "d_model": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--repeat", type=int, default=5, metavar="N", help="samples")
parser.add_argument("--json", metavar="FILE", help="write all results to this file")
parser.add_argument("--smoke", action="store_true", help="a small model on NumPy, for the tests")
parser.add_argument("--one", metavar="DIR", help=argparse.SUPPRESS)  # load it; print JSON
options = parser.parse_args()


def write(folder):
    """Write the model; return its parameters and the bytes of its largest tensor."""
    with uninitialised():
        model = Llama(LlamaConfig(**(SMALL if options.smoke else SIZES), block=2048))
    rng = np.random.default_rng(0)
    for _, parameter in model.named_parameters():
        values = rng.standard_normal(parameter.shape, np.float32)
        parameter.data = (0.02 * values).astype(BFLOAT16)
    gpuattn.save_pretrained(model, folder)
    stored = files.find_tensors(folder, [], set()).values()
    sizes = [math.prod(tensor.shape) for tensor in stored]
    return sum(sizes), max(sizes) * BFLOAT16.itemsize


def one(folder):
    """Return the seconds before a load and of the load, and the bytes of host memory it added."""
    begin = time.perf_counter()
    device = choose_device("numpy" if options.smoke else "auto")[0]
    gpu = device != "numpy"
    if gpu:
        start_libraries("bfloat16")
        array_module(device).cuda.Device().synchronize()
    started, held = time.perf_counter(), memory("VmRSS")
    model = gpuattn.load_pretrained(folder, dtype="bfloat16", device=device)
    if gpu:
        array_module(device).cuda.Device().synchronize()
    loaded, peak = time.perf_counter(), memory("VmHWM")
    stored = files.find_tensors(folder, [], set())
    for name, values in tensors_of(model, ARCHITECTURES["llama"]).items():
        if not has_bits_of(stored[name].map(), values):
            sys.exit(f"{name} does not have the bits of the file")
    return {"start_seconds": started - begin, "seconds": loaded - started,
            "host_bytes": peak - held}  # fmt: skip


def memory(name):
    """Return the bytes of host memory of this process: "VmRSS" now, "VmHWM" at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s*(\d+) kB", status)[1]) * 1024


def main():
    device, where = choose_device("numpy" if options.smoke else "auto")
    print(where)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        parameters, largest = write(folder)
        command = [sys.executable, *sys.argv, "--one", str(folder)]
        samples = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(options.repeat)
        ]
    seconds = statistics.median(sample["seconds"] for sample in samples)
    taken = max(sample["host_bytes"] for sample in samples)
    on_numpy = device == "numpy"
    allowed = largest + MORE_BYTES + on_numpy * 2 * parameters  # there the weights too
    reached = "reached" if seconds <= SECONDS and taken <= allowed else "NOT reached"
    print(
        f"{parameters:,} parameters in {seconds:.2f} s; required {SECONDS} s. Host memory "
        f"{taken / 1e6:.0f} MB; required {allowed / 1e6:.0f} MB: {reached}"
    )
    if options.json:
        document = origin(shlex.join(["python", *sys.argv]), array_module(device))
        document |= {"parameters": parameters, "largest_bytes": largest, "seconds": seconds,
                     "host_bytes": taken, "samples": samples}  # fmt: skip
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if options.one:
    print(json.dumps(one(Path(options.one))))
else:
    main()
