"""bench data: rows of generated stores and of given ones."""

import json

from click.testing import CliRunner

from gpuattn.bench import data
from gpuattn.cli.main import main


def test_rows_of_stores(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "CASES", {"text": ((256, 32),), "pairs": ((300, None),)})
    monkeypatch.setattr(data, "ROWS", {"text": 3, "pairs": 90})
    monkeypatch.setattr(data, "MEGABYTES", 1)
    monkeypatch.setattr(data, "usable_cores", lambda: 1)
    calls = [["--seconds", "0.01", "--json", str(tmp_path / "out.json")]]
    with data.generated("pairs", 50) as store:
        calls.append([str(store.folder), "--seconds", "0.01"])
        outputs = [CliRunner().invoke(main, ["bench", "data", *call]).stdout for call in calls]
    assert "blocks of 32 x 8" in outputs[0] and "packed pairs of 300" in outputs[0]
    assert "blocks" not in outputs[1] and "packed pairs of 300" in outputs[1]
    rows = json.loads((tmp_path / "out.json").read_text())["data"]
    assert len(rows) == 3 and rows[0]["mb_per_s"] > 0
    assert all(row["tokens_per_s"] > 0 and row["start"] >= 0 for row in rows)
