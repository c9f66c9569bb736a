"""bench train: FLOPs of a step, wrong losses refused, files, the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from ranks import command_by

from gpuattn.bench import results, timing
from gpuattn.bench.peers.train import by_layers
from gpuattn.bench.train import measure as train
from gpuattn.bench.train import ranks
from gpuattn.bench.train.cases import BESIDE, CELLS, MODELS, PEERS, TABLE, Step, small
from gpuattn.cli.bench import train as command
from gpuattn.cli.main import main
from gpuattn.data.tokenizer import BOS, EOS, SPECIALS, UNK
from gpuattn.parallel.communicator import Single

CEILINGS = {"copy_tbs": 4.0, "matmul_tflops": 800.0}
FAMILIES = ("tiny", "shakespeare", "vit-b16", "bert-base")


# ---- cells --------------------------------------------------------------------------------------


def test_cases_survive_files():
    for cell in CELLS.values():
        assert Step.from_dict(json.loads(json.dumps(cell.case.as_dict()))) == cell.case


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_of_a_case_are_those_of_its_model(name):
    case = replace(small(CELLS[name].case), vocab=128)  # a table without padding
    if case.masked:
        case = replace(case, masked=1.0)  # so that all tokens meet the head
    model = train.Ours(case, np).model
    # a head of images meets one token only
    lookups = ("position_weight", "positions", "types", "head.weight")
    tables = {p.size for path, p in model.named_parameters() if path.endswith(lookups)}
    matrices = sum(p.data.size for p in model.parameters() if p.ndim == 2)
    assert case.weights() == matrices - sum(tables)


def test_peers_get_what_each_layer_makes_of_the_memory():
    ours = train.Ours(replace(small(MODELS["tiny"]), layers=(1, 2)), np).weights
    names = [f"decoder.{i}.cross_attention.kv.weight" for i in range(2)]
    theirs = by_layers(ours, 2)
    assert set(names) <= set(theirs) and not any(name.startswith("memory") for name in theirs)
    whole = np.concatenate([theirs[name] for name in names])
    np.testing.assert_array_equal(whole, ours["memory.kv.weight"])
    assert theirs[names[0]].shape == (64, 32)


def test_flops_of_a_step():
    case = Step("none", (2, 8), vocab=100, width=4, heads=1, layers=(1,), hidden=16)
    weights = 4 * 4 * 4 + 2 * 4 * 16 + 4 * 100
    assert case.flops("step") == 6 * weights * 16 + 12 * 4 * 2 * 8 * 8 / 2
    both = replace(case, layers=(1, 1))
    weights = 3 * (4 * 4 * 4) + 2 * (2 * 4 * 16) + 4 * 100
    assert both.flops("step") == 6 * weights * 16 + 12 * 4 * 2 * (2 * 8 * 8 + 8 * 8 / 2)


def test_flops_of_images():
    """17.6 G products and sums for an image forward, as timm counts ViT-B/16; three times that."""
    case = CELLS["vit-b16"].case
    assert case.flops("step") / 128 == pytest.approx(3 * 2 * 17.58e9, rel=0.01)


def test_what_nanogpt_counts():
    """124 M parameters and 12,288 tokens: 6 N T; see Karpathy's estimate_mfu."""
    case = MODELS["gpt2-124m"]
    products = case.flops("step") - 12 * case.width * 12 * 12 * 1024**2 / 2
    assert products == pytest.approx(6 * 123.6e6 * 12288, rel=1e-3)


@pytest.mark.parametrize("name", ["bert-base", "bert-base-128"])
def test_flops_of_hidden_tokens(name):
    """12 layers for all tokens, the head for those alone that are guessed."""
    case = CELLS[name].case
    texts, length = case.shape
    guessed = round(0.15 * texts * length)
    layers = 12 * 12 * 768**2 * texts * length
    head = (768**2 + 768 * 30522) * guessed
    pairs = 12 * texts * length**2
    expected = 6 * (layers + head) + 12 * 768 * pairs
    assert case.flops("step") == pytest.approx(expected, rel=1e-5)
    assert case.bytes("step") == 36 * (12 * 12 * 768**2 + 768**2 + 768 * 30522)


def test_sizes_of_large_models():
    """36 and 24 + 24 layers; Radford et al. give GPT-2 large 774 M parameters (762 M in print)."""
    gpt, deep, base = CELLS["gpt2-large"].case, CELLS["deep"].case, MODELS["base"]
    assert gpt.weights() == 36 * 12 * 1280**2 + 50257 * 1280
    assert gpt.weights() + 1024 * 1280 == pytest.approx(774e6, rel=2e-3)
    table = 512 * 32768
    assert deep.weights() - table == 4 * (base.weights() - table)


def test_cells_beside_the_table_are_not_required():
    rows = [row_of(cell) for cell in TABLE]
    assert results.absent(rows) == [] and not {*BESIDE} & {*TABLE}
    names = ("vit-b16", "vit-b16-256", "bert-base", "bert-base-128", "gpt2-large", "deep")
    assert tuple(cell.case.model for cell in BESIDE) == names
    for cell in BESIDE:
        of_transformers = bool(cell.case.image or cell.case.masked)
        assert cell.peers == (*PEERS, *["hf-compile"] * of_transformers)


def test_a_vocabulary_without_padding_has_a_name_of_its_own():
    case = CELLS["gpt2-124m-unpadded"].case
    assert case.config().table_rows == case.vocab == 50257
    assert case.as_dict()["flags"].pop("pad_vocab") is False
    assert Step.from_dict(case.as_dict()) == case
    padded = MODELS["gpt2-124m"]
    assert padded.config().table_rows == 50304 and "pad_vocab" not in padded.as_dict()["flags"]
    assert case.flops("step") == padded.flops("step")
    ours = train.Ours(small(case), np)
    assert len(ours.weights["embedding.weight"]) == small(case).vocab == 200
    updates = train.Updates(ours)
    train.check_losses("eager", {"eager": train.losses_of(updates, updates)})


def test_hidden_tokens_of_texts_without_padding():
    case = small(CELLS["bert-base"].case)
    ours = train.Ours(case, np)
    tokens, rows, labels = ours.inputs
    assert tokens.shape == case.shape == (8, 16)
    assert (tokens[:, 0] == BOS).all() and (tokens[:, -1] == EOS).all()
    np.testing.assert_array_equal(ours.batch.cu_seqlens, 16 * np.arange(9))
    assert len(rows) == len(labels) == ours.batch.target_tokens == round(0.15 * case.tokens)
    assert (np.diff(rows) > 0).all() and not {0, 15} & {*rows % 16}
    assert labels.min() >= SPECIALS and labels.max() < case.vocab
    hidden = tokens.ravel()[rows] == UNK
    assert 0.5 < hidden.mean() <= 1 and (tokens == UNK).sum() == hidden.sum()


# ---- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [cell.case.model for cell in BESIDE])
def test_small_models_learn(name):
    updates = train.Updates(train.Ours(small(CELLS[name].case), np))
    train.check_losses("eager", {"eager": train.losses_of(updates, updates)})


def our_loss(ours):
    updates = train.Updates(ours)
    updates()
    return updates.loss()


def their_loss(torch, model, ours):
    inputs = [torch.from_numpy(np.array(x)) for x in ours.inputs]
    with torch.no_grad():
        return model(*[x if x.dtype == torch.uint8 else x.long() for x in inputs]).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_pytorch_have_our_loss(name):
    torch = pytest.importorskip("torch", reason="PyTorch, a peer of bench, is not installed")
    from gpuattn.bench.peers.torch_models import first_weights, new_model

    case = replace(small(CELLS[name].case), dropout=0.0)
    ours, model = train.Ours(case, np), new_model(case)
    model.load_state_dict(first_weights(model, by_layers(ours.weights, case.layers[-1])))
    assert their_loss(torch, model, ours) == pytest.approx(our_loss(ours), rel=1e-4)


@pytest.mark.parametrize("name", ["vit-b16", "bert-base"])
def test_models_of_transformers_have_our_loss(name):
    torch = pytest.importorskip("torch", reason="PyTorch, a peer of bench, is not installed")
    pytest.importorskip("transformers", reason="transformers, a peer, is not installed")
    from gpuattn.bench.peers.hugging_face_bert import HiddenTokens
    from gpuattn.bench.peers.hugging_face_vit import Classifier

    case = replace(small(CELLS[name].case), dropout=0.0)
    ours = train.Ours(case, np)
    model = (Classifier if case.image else HiddenTokens)(case, ours.weights)
    assert their_loss(torch, model, ours) == pytest.approx(our_loss(ours), rel=1e-4)


def test_a_restart_takes_back_all_updates():
    updates = train.Updates(train.Ours(small(MODELS["tiny"]), np))
    first = train.losses_of(updates, updates)
    assert train.losses_of(updates, updates) == first
    train.check_losses("eager", {"eager": first})


def test_a_step_goes_on_with_other_texts():
    case = small(MODELS["gpt2-124m"])
    ours = train.Ours(case, np)
    updates = train.Updates(ours)
    few = train.losses_of(updates, updates)
    ours.read([np.resize(part, (2 * len(part), part.shape[1])) for part in ours.inputs])
    updates = train.Updates(ours)
    np.testing.assert_allclose(train.losses_of(updates, updates), few, rtol=1e-4)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([5.0, 5.1], "the loss went from 5 to 5.1"),
        ([5.0, float("nan")], "the loss went from 5 to nan"),
        ([5.2, 4.0], "the first loss is 5.2, ours is 5"),
        ([5.0, 4.2], "the last loss is 4.2, ours is 4"),
    ],
)
def test_a_step_that_learns_otherwise_gets_no_figure(losses, message):
    train.check_losses("peer", {"eager": [5.0, 4.0], "peer": [5.05, 4.05]})
    with pytest.raises(AssertionError, match=f"peer: {message}"):
        train.check_losses("peer", {"eager": [5.0, 4.0], "peer": losses})


# ---- files and tables ---------------------------------------------------------------------------


def row_of(cell, missing=()):
    times = {"eager": [40000.0] * 20, "graph": [10000.0] * 20}
    times |= {name: [12000.0] * 20 for name in cell.peers if name not in missing}
    row = train._row(cell, times, {}, dict.fromkeys(missing, "too [old]"), CEILINGS)
    return row | {"peak_bytes": dict.fromkeys(times, 2**31)}


def test_a_row_is_rated_by_its_graph():
    row = row_of(TABLE[1])
    assert (row["impl"], row["us"], row["eager_us"]) == ("graph", 10000, 40000)
    assert row["ratio_to_best_peer"] == pytest.approx(1.2)
    assert row["tokens_per_s"] == pytest.approx(8192 / 10e-3)
    assert row["tflops"] == pytest.approx(TABLE[1].case.flops("step") / 1e10)
    assert row["ceiling_share"] == pytest.approx(row["tflops"] / 800)


def test_what_is_absent_is_named():
    rows = [row_of(cell) for cell in TABLE]
    assert results.absent(rows) == []
    assert len(results.absent(rows[1:])) == 1
    assert len(results.absent([*rows[1:], row_of(TABLE[0], missing=["torch-graph"])])) == 0
    assert all(results.holds(rows, cell, with_peers=True) for cell in TABLE)


def test_the_table_shows_peers(capsys):
    rows = [row_of(TABLE[0], missing=PEERS[1:]), row_of(TABLE[1])]
    command._show([*rows, rows[1] | {"impl": "eager", "no_graph": "no graphs here"}], CEILINGS)
    shown = capsys.readouterr().out
    assert "base, 128 x 64" in shown and "4.00 x" in shown and "1.20" in shown
    assert "without torch-graph: too [old]" in shown and "no graphs here" in shown
    assert "2.00/2.00/-/-" in shown and "2.00/2.00/2.00/2.00" in shown


# ---- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_numpy_runs_small_models(tmp_path):
    path = tmp_path / "rows.json"
    named = [word for name in FAMILIES for word in ("--model", name)]
    arguments = ["train", *named, "--device", "numpy", "--peers", "--json", path]
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "shakespeare, 8 x 16" in result.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["flags"]["model"] for row in rows] == list(FAMILIES)
    for row in rows:
        assert row["impl"] == "eager" and len(row["samples_us"]) >= 20
        assert row["us"] == row["eager_us"] == timing.median(row["samples_us"])
        first, last = row["losses"]["eager"]
        assert last < first
        case = results.case_of(row)
        assert row["tokens_per_s"] == pytest.approx(case.tokens / row["us"] * 1e6)
        assert row["tflops"] == pytest.approx(case.flops("step") / row["us"] / 1e6)
    again = call(*arguments, "--missing")
    assert again.exit_code == 0, again.stderr
    assert json.loads(path.read_text())["rows"] == rows


def test_a_sweep_over_batches_and_its_bars(tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "steps.json", tmp_path / "steps.png"
    result = call("train", "--model", "tiny", "--batch", "2", "--batch", "4", "--device", "numpy",
                  "--json", path, "--plot", picture)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["shape"] for row in rows] == [[2, 16], [4, 16]]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "bases"], "'bases' is not one of"),
        (["train", "--model", "bases"], "Did you mean 'base'?"),
        (["train", "softmax"], "unexpected extra argument (softmax)"),
        (["train", "--shape", "8x8"], "No such option"),
        (["train", "--impl", "reference"], "No such option"),
        (["train", "--batch", "0"], "0 is not in the range x>=1"),
        (["train", "--causal"], "No such option"),
        (["fused", "--model", "base"], "No such option"),
    ],
)
def test_wrong_usage(arguments, message):
    result = call(*arguments, "--device", "numpy")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_the_same_in_pytorch(gpu, name):
    torch = pytest.importorskip("torch")
    from gpuattn.bench.peers.train import Peer

    case = replace(small(CELLS[name].case), dropout=0.0)
    ours = train.Ours(case, np)
    peer = Peer(case, ours)
    with torch.no_grad():
        theirs = peer.model(*peer.inputs).item()
    updates = train.Updates(ours)
    updates()
    assert theirs == pytest.approx(updates.loss(), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_beside_pytorch(gpu, monkeypatch, name):
    monkeypatch.setattr(timing, "REST", 0)
    cell = CELLS[name]
    shape = (32, 5 if cell.case.image else 32)
    case = replace(
        small(cell.case), dtype="bfloat16", shape=shape, width=64, hidden=256, dropout=0.0
    )
    cell = cell._replace(case=case, peers=("torch-eager",))
    row = train.measure(cell, gpu, CEILINGS, with_peers=True)
    assert row["peers_missing"] == {}
    assert {"eager", "torch-eager", row["impl"]} == set(row["losses"]) == set(row["peak_bytes"])
    assert row["impl"] == "graph" or row["no_graph"]
    assert all(size > 0 for size in row["peak_bytes"].values())


@pytest.mark.gpu
def test_rows_of_odd_length_without_padding(gpu, monkeypatch):
    monkeypatch.setattr(timing, "REST", 0)
    cell = CELLS["gpt2-124m-unpadded"]
    sizes = {"shape": (16, 32), "width": 64, "heads": 1, "layers": (1,), "hidden": 256}
    row = train.measure(cell._replace(case=replace(cell.case, **sizes)), gpu, CEILINGS)
    assert row["case"]["flags"]["vocab"] == 50257 and not row["case"]["flags"]["pad_vocab"]
    assert set(row["losses"]) == {"eager", row["impl"]}


# ---- several ranks ------------------------------------------------------------------------------


def test_steps_of_ranks(tmp_path):
    """On NumPy: equal bits with and without overlap, and figures that follow from the samples."""
    path = tmp_path / "train.json"
    lines = """
import gpuattn.bench.train.ranks as measured
measured.SECONDS = 0.01
"""
    given = ("bench", "train", "--model", "shakespeare", "--device", "numpy", "--json", path)
    code, said, _ = command_by(2, *given, lines=lines)
    assert code == 0 and "1/1 train" in said, said
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ranks"] == 2 and row["peers"] == {} and len(row["samples_us"]) >= 20
    assert row["efficiency"] == row["alone_us"] / row["us"]
    assert row["us"] == timing.median(row["samples_us"]) == row["ways"]["node"]["us"]
    assert 0 < row["wait_share"] < 1 and set(row["ways"]) == set(ranks.WAYS)
    case = results.case_of(row)
    assert row["tokens_per_s"] == pytest.approx(2 * case.tokens / row["us"] * 1e6)
    assert results.absent([row]) == []


def test_bits_are_those_of_deterministic_gradients_and_nothing_else_is(monkeypatch):
    """Gradients of attention that is not deterministic have other bits in each pass on a GPU."""
    taken, loss = [], train.Ours.loss

    def noted(ours, batch, dloss):
        taken.append({module.deterministic for _, module in ours.model.modules()})
        return loss(ours, batch, dloss)

    monkeypatch.setattr(train.Ours, "loss", noted)
    for way in ranks.WAYS:
        updates = ranks.RankUpdates(small(MODELS["shakespeare"]), np, Single(), way)
        updates()
        before, calls = updates.digest(), updates.step.calls
        updates()
        assert taken == [{False}, *[{True}] * ranks.CHECKED, {False}]
        taken.clear()
        assert updates.digest() == before and updates.step.calls is not calls
        taken.clear()


def test_ways_that_differ_are_refused():
    losses = {"eager": [5.0, 4.0]} | {way: [5.0, 4.0] for way in ranks.WAYS}
    digests = {way: ["a", "a"] for way in ranks.WAYS}
    ranks._agree(Single(), losses, digests)
    with pytest.raises(AssertionError, match="node: overlap changes the bits"):
        ranks._agree(Single(), losses, digests | {"node": ["b", "b"]})
    with pytest.raises(AssertionError, match="none: the parameters of ranks differ"):
        ranks._agree(Single(), losses, digests | {"none": ["a", "b"]})
    with pytest.raises(AssertionError, match="none, after: the last loss is 3"):
        ranks._agree(Single(), losses | {"none, after": [5.0, 3.0]}, digests)
