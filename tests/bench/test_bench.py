"""bench ops: samples for every op, wrong results refused, rows of results, the command."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.bench import ops, timing
from gpuattn.bench.samples import SAMPLES, sample
from gpuattn.cli.main import main
from gpuattn.errors import ConfigError
from gpuattn.impls import explain

SMALL = {name: tuple(min(n, 32) for n in entry.shape) for name, entry in SAMPLES.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_op_can_be_explained(name):
    op, args, kwargs = sample(name, SMALL[name], "float32")
    assert explain(op, *args, **kwargs).chosen == "reference"


def test_a_row_has_samples_and_a_median():
    rows = list(ops.measure("softmax", (16, 32), "float32", np))
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert len(row["samples_us"]) >= 20
        assert row["us"] == timing.median(row["samples_us"])
        assert row["gbs"] > 0


def test_a_wrong_result_gets_no_figure(monkeypatch):
    def wrong(x, impl=None):
        return x if impl == "reference" else x + 1

    with pytest.raises(AssertionError, match="a wrong result is not timed"):
        ops._check(wrong, [np.ones(3, np.float32)], {}, "raw-simt", "float32")


def test_unknown_op_and_shape():
    with pytest.raises(ConfigError, match="ops: softmax"):
        sample("sofmax")
    with pytest.raises(ConfigError, match="rows x columns, such as 8192x1024"):
        sample("softmax", (3,))


def call(*arguments):
    """Run the program, which adds options and errors to its commands."""
    return CliRunner().invoke(main, arguments)


def test_command_writes_json(tmp_path):
    path = tmp_path / "rows.json"
    options = ["softmax", "--shape", "16x32", "--device", "numpy", "--json", str(path)]
    assert "softmax" in call("bench", "ops", *options).stdout
    document = json.loads(path.read_text())
    assert document["ceilings"]["copy_tbs"] > 0
    assert len(document["rows"]) == 2


def test_kernels_lists_explains_and_compiles(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    assert "softmax.cu" in call("kernels").stdout
    assert "raw-simt" in call("kernels", "--why", "softmax", "--shape", "8x16").stdout
    warm = call("kernels", "--warm", "--arch", "sm_90a", "--file", "dropout.cu")
    assert "kernels for sm_90a" in warm.stdout
    assert list(tmp_path.glob("dropout-sm_90-*.cubin"))
    warm = call("kernels", "--warm", "--arch", "sm_120", "--file", "softmax_hopper.cu")
    assert "0 kernels for sm_120" in warm.stdout
    assert call("kernels", "--why", "softmax", "--shape", "8by16").exit_code == 2
    assert call("kernels", "--warm", "--arch", "hopper").exit_code == 2


@pytest.mark.parametrize("arguments, message", [
    (["bench", "ops", "softmax", "--shape", "0x0"], "0x0 is empty; accepted: sizes from 1"),
    (["bench", "fused", "softmax", "--shape", "3x00"], "3x00 is empty"),
    (["bench", "softmax", "--shape", "16x32"],
     "write: gpuattn bench ops softmax or gpuattn bench fused softmax"),
    (["bench", "adamw", "--peers"], "an op, not a benchmark; write: gpuattn bench fused adamw"),
    (["bench", "linear"], "is an op, not a benchmark; write: gpuattn bench ops linear  (see: "),
    (["bench", "--roofline"], "write: gpuattn bench roofline"),
    (["bench", "fusd"], "no benchmark 'fusd'. Did you mean 'fused'?"),
    (["bench", "ops", "softmax", "--peers"], "No such option"),
    (["bench", "ops", "sofmax"], "Did you mean 'softmax'?"),
    (["bench", "roofline", "softmax"], "unexpected extra argument"),
    (["kernels", "--why", "softmax", "--shape", "0x4"], "0x4 is empty"),
    (["kernels", "--why", "softmax", "--arch", "sm_90a"], "--arch is for --warm"),
    (["kernels", "--arch", "sm_90a"], "--arch is for --warm"),
    (["kernels", "--why", "softmax", "--warm"], "accepted: one of them"),
])  # fmt: skip
def test_what_cannot_be_meant(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and message in result.stderr
