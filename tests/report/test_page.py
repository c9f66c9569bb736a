"""report.html: complete for any run, escaped, self-contained; and its figures."""

import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import prepare
from gpuattn.data.preparing.sources import find_sources
from gpuattn.errors import CheckpointError
from gpuattn.report import axes, page, style, svg
from gpuattn.report.markup import Markup, tag
from gpuattn.report.page import write_page
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.folder import RunFolder
from gpuattn.train.progress import Listener
from gpuattn.train.session import train

NASTY = '<script>alert("&")</script>'
PROFILE = {
    "where": "a <GPU>", "dtype": "bfloat16", "step_us": 1234.0,
    "ceilings": {"matmul_tflops": 700.0, "copy_tbs": 4.0},
    "vocabulary": {"size": 50257, "rows": 50304, "pads": True, "tokens": 12288,
                   "padded_us": 4100.0, "plain_us": 8200.0},
    "rows": [
        {"op": "linear", "direction": "forward", "calls": 9, "launches": 9.0, "us": 800.0,
         "bytes": 4e6, "flops": 2e11, "share": 0.65, "roof": 0.4},
        {"op": "adamw", "direction": "update", "calls": 1, "launches": 1.0, "us": 100.0,
         "bytes": 2e8, "flops": 0, "share": 0.08, "roof": 0.5},
        {"op": "the rest", "direction": "", "calls": None, "launches": None, "us": 334.0,
         "bytes": None, "flops": None, "share": 0.27, "roof": None},
    ],
}  # fmt: skip


ROWS = {  # a run with evaluations of 8 s after every 20 updates, which take 2 s
    "train": [
        {"update": n, "seconds": n / 10 + 8 * ((n - 1) // 20), "loss": 4 / n, "rate": 10.0 * n}
        for n in range(10, 70, 10)
    ],
    "valid": [
        {"update": n, "seconds": n / 10 + 8 * (n / 20 - 1), "loss": 3 / n, "exact_match": score,
         "exact_by_kind": {"dates": score}, "bleu": score}
        for n, score in ((20, 20.0), (40, 60.0), (60, 100.0))
    ],
}  # fmt: skip


class Reader(HTMLParser):
    """Checks that elements are closed in order; keeps tags, attributes and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.values, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [(name, value) for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path):
    """Return the Reader of a page, after checking that it needs no network and no script."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n<html")
    found = Reader(text)
    assert not {"script", "link", "iframe", "object", "img", "a"} & set(found.tags)
    assert not {"src", "href"} & {name for name, _ in found.values}
    assert not re.search(r"https?://|url\(|@import|javascript:", text)
    assert not [name for name, _ in found.values if name.startswith("on")]
    return found


def figures(markup):
    """Return {caption: figure} of a page or a part of it."""
    found = re.findall(r"<figure><figcaption>([^<]*)</figcaption>(.*?)</figure>", markup)
    return dict(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two evaluations, on words of which one must be escaped."""
    folder, rng = tmp_path_factory.mktemp("page"), np.random.default_rng(0)
    words = ["red", "green", "old", "cat", "dog"]
    lines = [" ".join([*rng.choice(words, rng.integers(1, 6)), NASTY]) for _ in range(60)]
    for name in ("src", "tgt"):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    config = TrainConfig(
        source=str(folder / "src"), target=str(folder / "tgt"), vocab_size=400, max_len=80, dim=16,
        heads=2, layers=(1, 2), ffn=16, dropout=0.0, batch=200, lr=1e-2, warmup=4, length="40u",
        eval_every="20u", score_pairs=4, beam=1,
    )  # fmt: skip
    train(config, folder / "run", device="numpy", command="gpuattn train <here>",
          origins={"lr": "command line"})  # fmt: skip
    return folder / "run", config


def test_a_finished_run_has_a_page(run):
    found = read(run[0] / page.PAGE)
    for words in ("Finished after 40 updates", " on 1 held-out sentence.", "BLEU", "Curves",
                  "Samples", "Attention", "gpuattn profile", "rows", "gpuattn train <here>",
                  "numpy", "lr = 0.01  # command line", NASTY):  # fmt: skip
        assert words in found.text
    raw = (run[0] / page.PAGE).read_text()
    assert "<script" not in raw and "&lt;script&gt;" in raw
    maps = [text for text in found.text.split("layer ")[1:] if ", " in text[:14]]
    assert len(maps) == 2 + 2  # a mean of each layer, and the heads of the last
    assert len(raw) < 400_000


def test_a_profile_in_the_folder_is_shown(run):
    (run[0] / page.PROFILE).write_text(json.dumps(PROFILE))
    found = read(write_page(run[0]))
    assert "a <GPU>" in found.text and "Ops under the roofline" in found.text
    assert "adamw update: 100 us, 8.0% of the step, 50% of the roof" in found.text
    assert "700 TFLOP/s and 4 TB/s" in found.text and "gpuattn profile" not in found.text
    for words in ("4.1 ms with 50,304 rows and 8.2 ms with 50,257", "at 12,288 tokens",
                  "padding saves 50%"):  # fmt: skip
        assert words in found.text
    (run[0] / page.PROFILE).write_text("{")
    assert "gpuattn profile" in read(write_page(run[0])).text
    (run[0] / page.PROFILE).unlink()


def test_padding_may_cost_time_and_may_be_off():
    found = PROFILE["vocabulary"] | {"plain_us": 2050.0}
    assert page.describe_padding(found).endswith("padding costs 100%")
    assert page.describe_padding(found | {"pads": False}).endswith("padding would cost 100%")


def test_a_stopped_run_shows_its_results_so_far(run, tmp_path):
    train(run[1], tmp_path / "run", device="numpy", stop=lambda: True)
    assert not (tmp_path / "run" / page.PAGE).exists()
    found = read(write_page(tmp_path / "run"))
    assert "Stopped after 1 updates" in found.text and "Not evaluated yet" in found.text
    assert "Samples" not in found.text and "Attention" not in found.text


def test_a_run_that_saved_nothing_still_has_a_page(run, tmp_path):
    RunFolder(tmp_path / "run").create(run[1], {}, RunFolder(run[0]).tokenizer())
    found = read(write_page(tmp_path / "run"))
    assert "Stopped after 0 updates" in found.text and "Curves" not in found.text
    with pytest.raises(CheckpointError, match="no config.toml"):
        write_page(tmp_path)


def test_a_language_model(tmp_path):
    (tmp_path / "text").write_text(f"a rose {NASTY} is a rose\n" * 60)
    config = TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2, layers=1,
        block=16, dropout=0.0, batch=64, lr=1e-2, warmup=4, length="20u", eval_every="10u",
    )  # fmt: skip
    train(config, tmp_path / "run", device="numpy")
    found = read(tmp_path / "run" / page.PAGE)
    for words in (
        "Language model of",
        "Perplexity",
        "training",
        "validation",
        "Samples",
        "characters",
        "padding",
    ):
        assert words in found.text
    assert "Attention" not in found.text
    share = 100 * (64 - len(RunFolder(tmp_path / "run").tokenizer())) / 64
    assert f"in tables of 64 rows: {share:.2g} % of them padding" in found.text
    unpadded = dataclasses.replace(config, pad_vocab=False, length="1u", warmup=1)
    train(unpadded, tmp_path / "other", device="numpy")
    assert "rows: all in use." in read(tmp_path / "other" / page.PAGE).text


def test_a_run_of_a_store_shows_its_figures(tmp_path):
    rows = [f"a rose {NASTY} is a rose", "a", "is"] * 40
    (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    plan = Plan(sources=tuple(find_sources([tmp_path / "text.jsonl"])), tokenizer="chars",
                documents=True, mix={"text": 1.0}, valid=0.4)  # fmt: skip
    store = prepare(plan, tmp_path / "store")
    config = TrainConfig(
        model="gpt2", lm=str(store.folder), documents=True, dim=16, heads=2, layers=1, block=16,
        dropout=0.0, batch=64, lr=1e-2, warmup=1, length="1u",
    )  # fmt: skip
    train(config, tmp_path / "run", device="numpy")
    found = read(tmp_path / "run" / page.PAGE)
    for words in (f"A token store of {len(store):,} documents: ", "of 1 file; left out: nothing; ",
                  f"{len(store.valid):,} more held out. Mix: text 1 of {len(store):,} rows",
                  f"{len(store.tokens('text')):,}", "tokens for validation"):  # fmt: skip
        assert words in found.text
    drawn = figures((tmp_path / "run" / page.PAGE).read_text())["Rows by length: text"]
    assert drawn.count("<rect") == len(store.figures()["lengths"]["text"])


def test_a_page_that_cannot_be_written_is_a_warning(run, tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpuattn.train.session.write_page", full)
    said, report = [], Listener()
    report.say = lambda topic, text: said.append((topic, text))
    config = dataclasses.replace(run[1], length="1u", warmup=1, score_pairs=0)
    assert train(config, tmp_path / "run", device="numpy", listener=report).finished
    assert ("warning", "report.html cannot be written: No space left on device") in said


def test_the_verdict_is_one_line_about_quality():
    best = {"loss": 0.5, "exact_match": 96.0, "exact_by_kind": {}, "bleu": 98.9, "chrf": 97.0,
            "sentences": 1000}  # fmt: skip
    for row, words in (
        (best, "BLEU 98.9, chrF 97.0 on 1,000 held-out sentences."),
        (best | {"exact_by_kind": {"dates": 96.0}},
         "96.0 % of 1,000 held-out sentences translated exactly, BLEU 98.9."),
        (best | {"sentences": 1}, "BLEU 98.9, chrF 97.0 on 1 held-out sentence."),
        ({"loss": 0.5, "perplexity": 3.5}, "Perplexity 3.50 on held-out text."),
        ({"loss": 0.5, "accuracy": 97.5}, "97.50 % of held-out texts right."),
        ({"loss": 0.5}, "Loss 0.500 nats per token of held-out sentences."),
        (None, "Not evaluated yet."),
    ):  # fmt: skip
        assert page._verdict({"state": "finished", "best": row}, "Held-out texts") == words


def test_curves_are_over_updates_and_distinguish_both_losses(run):
    charts = figures(page._charts(ROWS, run[1]))
    assert list(charts) == [
        "Loss (nats per target token)", "Held-out sentences, translated greedily",
        "Tokens per second, source and target",
    ]  # fmt: skip
    loss, scores, _ = charts.values()
    assert "training, smoothing 0.1" in loss and "validation, unsmoothed" in loss
    plain = dataclasses.replace(run[1], label_smoothing=0.0)
    assert "smooth" not in page._charts(ROWS, plain)
    # Evaluations take 8 s each without updates; the distance between updates stays the same.
    line = re.search('points="([^"]*)"', loss)[1].split()
    places = np.array([float(place.split(",")[0]) for place in line])
    assert np.ptp(np.diff(places)) < 0.2
    for chart in charts.values():
        texts = re.findall(r"<text[^>]*>([^<]*)", chart)
        assert "updates" in texts and {"5 s", "15 s"} <= set(texts)
    exact, bleu = re.findall("<polyline[^>]*>", scores)  # equal values, different styles
    assert re.search('points="([^"]*)"', exact)[1] == re.search('points="([^"]*)"', bleu)[1]
    assert 'class="line s0"' in exact and 'class="line s1"' in bleu
    assert re.search(r"\.line\.s1 {[^}]*stroke-dasharray", style.STYLE)
    assert scores.count("<circle") == scores.count("<rect") == 3 + 1  # and one in the legend
    assert "BLEU 60 at update 40" in scores


def test_rows_of_old_runs_still_draw(run):
    bare = [{"update": 20, "seconds": 1.5, "loss": 2.0}]
    assert page._charts({"train": bare, "valid": []}, run[1]).count("<svg") == 1
    assert page._charts({"train": [], "valid": []}, run[1]) is None


def test_with_damaged_weights_only_the_maps_are_missing(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    for path in (tmp_path / "run").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    found = read(write_page(tmp_path / "run"))
    assert "Samples" in found.text and "Attention" not in found.text


# ---- markup and pictures ------------------------------------------------------------------------


def test_every_plain_string_is_escaped():
    assert (
        tag("b", "<", Markup("<i>"), ["&", None], class_='"')
        == '<b class="&quot;">&lt;<i>&amp;</b>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert tag("p", "a\x00\x1bb\tc") == "<p>ab\tc</p>"  # characters that XML does not allow


def test_curves_leave_out_invalid_points():
    assert svg.curves({"a": [], "b": [(1, math.nan)]}) is None
    assert svg.curves({"a": [(1, -1.0)]}, log=True) is None
    drawn = svg.curves({"": [(0, 1.0), (1, math.inf), (2, 3.0)], "b": []})
    assert drawn.count("<polyline") == 1 and drawn.count("<circle") == 2 and "inf" not in drawn
    assert svg.curves({"a": [(1, 5.0)]})  # a single point is drawn too
    many = svg.curves({"a": [(i, i) for i in range(1000)]})
    assert len(re.search('points="([^"]*)"', many)[1].split()) == 250


@pytest.mark.parametrize("values, log, texts", [
    ([0, 10], False, ["0", "2", "4", "6", "8", "10"]), ([0, 24_000], False, ["0", "5k", "10k"]),
    ([0.1, 4], True, ["0.1", "0.2", "0.5", "1", "2"]), ([1e9, 1e15], True, ["1G"]),
])  # fmt: skip
def test_ticks_are_round(values, log, texts):
    found = axes.Axis(values, 0, 100, log).ticks()
    assert [text for _, text in found][: len(texts)] == texts
    assert len(found) <= 12


def test_a_map_has_a_cell_for_each_visible_weight():
    drawn = svg.heat_map(np.array([[0.9, 0.1, 0.0]]), ["a <"], ["x", "y", "z"], "t")
    assert drawn.count('class="cell"') == 2 and "a &lt;" in drawn
    Reader(drawn)
    drawn = svg.heat_map(np.ones((1, 1)), ["a" * 16], ["b" * 17], "t")
    assert f">{'a' * 16}</text>" in drawn
    assert f"<title>{'b' * 17}</title>{'b' * 15}\N{HORIZONTAL ELLIPSIS}</text>" in drawn


def test_maps_fill_the_width_with_columns_as_wide_as_their_words():
    weights = np.eye(3, 4)
    few = svg.heat_maps({"a": weights, "b": weights}, list("abc"), list("wxyz"))
    many = svg.heat_maps({"a": np.eye(3, 12)}, list("abc"), ["a long word"] * 12)
    assert list(figures(few)) == ["a", "b"]
    least, more = (int(re.search(r"--least: (\d+)px", text)[1]) for text in (few, many))
    assert 0 < least < more
    assert "repeat(auto-fill, minmax(min(100%, var(--least" in style.STYLE
    assert ".charts svg { width: 100%; }" in style.STYLE


def test_no_roofline_without_ceilings():
    assert svg.roofline(PROFILE["rows"], None) is None


def test_labels_of_the_roofline_do_not_overlap():
    # Many points at almost the same place, as for ops of one kind.
    rows = [
        {"op": f"an_op_{i}", "direction": svg.DIRECTIONS[i % 3], "us": 10.0 + i % 4, "bytes": 1e7,
         "flops": 0 if i < 14 else 1e8 * i, "share": 0.03, "roof": 0.5}
        for i in range(28)
    ]  # fmt: skip
    drawn = svg.roofline(rows, PROFILE["ceilings"])
    Reader(drawn)
    texts = re.findall(r'<text x="([^"]*)" y="([^"]*)" class="s\d">(an_op_\d+)<', drawn)
    assert sorted(name for *_, name in texts) == sorted(row["op"] for row in rows)
    boxes = [(float(x), float(y), float(x) + 5.5 * len(name)) for x, y, name in texts]
    for i, (left, foot, right) in enumerate(boxes):
        assert svg.ROOFLINE.left < left and right < svg.ROOFLINE.width
        for other_left, other_foot, other_right in boxes[:i]:
            apart = left >= other_right or other_left >= right
            assert apart or abs(foot - other_foot) >= 11.9


def test_a_label_without_space_is_left_out():
    box = axes.Box(100, 40, 0, 0, 0, 0)
    places = svg.label_places([(50, 20, 3), (50, 20, 3)], [30, 200], box)
    assert places == [(57, 20, 30), None]


def test_each_curve_of_a_chart_has_a_look():
    drawn = str(svg.curves({f"{i}": [(1, i + 1.0), (2, i + 2.0)] for i in range(svg.LOOKS + 1)}))
    looks = re.findall(r'<polyline[^>]*class="line (s\d)"', drawn)
    assert looks == [f"s{i % svg.LOOKS}" for i in range(svg.LOOKS + 1)]
    for look in looks:
        assert (
            f".line.{look} {{ stroke: var(--{look})" in style.STYLE
            and f"--{look}: #" in style.STYLE
        )
