"""Marian folders: searches and tokens as those of transformers, recorded in ``golden/marian-*``."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuattn
from gpuattn.data.tokenizer import Tokenizer
from gpuattn.decode.options import BeamOptions
from gpuattn.engine import Engine
from gpuattn.errors import ConfigError, DataError, PretrainedError
from gpuattn.models import TranslationConfig, TranslationModel
from gpuattn.pretrained.generation import describe_search, search_settings

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(GOLDEN.glob("marian-*"))
SWISH = GOLDEN / "marian-swish"  # with a tokenizer
MOST = 11  # tokens of the recorded texts


@pytest.fixture
def copy(tmp_path):
    """Return a function that copies the golden folder, with other values in one of its files."""

    def make(name, **values):
        folder = tmp_path / "copy"
        shutil.copytree(SWISH, folder, dirs_exist_ok=True)
        old = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(old | values))
        return folder

    return make


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_searches_find_what_generate_finds(folder, tmp_path):
    model = gpuattn.load_pretrained(folder, device="numpy")
    given, c = dict(np.load(folder / "expected.npz")), model.config
    sources = [
        row[: n - 1].tolist() for row, n in zip(given["tokens"], given["lengths"], strict=True)
    ]
    for row in json.loads((folder / "searches.json").read_text()):
        settings = json.loads((folder / "generation_config.json").read_text()) | row["settings"]
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        search, most = search_settings(tmp_path, c.eos)
        assert most == MOST and search.banned == (c.bos,) and search.eos == (c.eos,)
        chosen = vars(search) | {"nbest": settings.get("num_return_sequences", 1)}
        found = Engine(model).translate(sources, limits=[most] * 3, bos=c.bos, **chosen)
        found = [text for texts in found for text in texts]
        assert [text.tokens for text in found] == row["texts"], row["settings"]
        if row["scores"]:  # of a greedy search there are none
            scores = [text.normalised for text in found]
            np.testing.assert_allclose(scores, row["scores"], rtol=0, atol=1e-5)


def test_pieces_and_texts_are_those_of_transformers():
    tokenizer = gpuattn.load_tokenizer(SWISH)
    recorded = json.loads((SWISH / "tokenized.json").read_text())
    for side, own in (("sources", tokenizer), ("targets", tokenizer.target)):
        for text, ids in recorded[side]:
            assert [*own.encode(text), 0] == ids, (side, text)
    for ids, text in recorded["decoded"]:
        assert tokenizer.decode(ids) == tokenizer.target.decode(ids) == text
    assert len(tokenizer) == 67 and tokenizer.specials == (0, 1, 66)
    assert (tokenizer.piece(2), tokenizer.piece(99)) == (">>nds<<", "<unk>")


def test_texts_are_translated_as_by_transformers():
    recorded = json.loads((SWISH / "tokenized.json").read_text())
    lines = [text for text, _ in recorded["sources"][: len(recorded["translations"])]]
    translator = gpuattn.load_run(SWISH, device="numpy", task="translation")
    assert translator.translate(lines) == recorded["translations"]


def test_scores_are_those_of_the_search():
    translator = gpuattn.load_run(SWISH, device="numpy")
    ((best,),) = translator.nbest(["the cat sat"], 1, beam=3, max_length=9)
    settings = {"bos": 66, "eos": 0, "banned": [66], "beam": 3, "stopping": "hf"}
    ids = translator.tokenizer.encode("the cat sat")
    ((text,),) = Engine(translator.model).translate(
        [ids], limits=[9], length_penalty=0.8, **settings
    )
    assert len(text.tokens) == best.tokens == 9 and text.score == pytest.approx(best.logprob)
    (scores,) = Engine(translator.model).score([(ids, text.tokens)])
    assert scores[:9].sum() == pytest.approx(text.score, abs=1e-4)
    with pytest.raises(DataError, match=r"22 tokens long; accepted: up to 21 \(and the end mark"):
        translator.check_pair("the cat", "h" * 21)


def test_the_loss_knows_the_bias_and_the_marks():
    """As the mean of what ``logits`` says of the labels."""
    model = gpuattn.load_pretrained(SWISH, device="numpy")
    source, target = [[7, 8, 9, 0]], [[66, 3, 4]]
    tokens, labels = (np.array(x, np.int32) for x in (target, [[3, 4, 0]]))
    with model.evaluating():
        logits = model.logits(np.array(source, np.int32), tokens).data[0, :, :67]
    top = logits.max(1, keepdims=True)
    each = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    expected = each[np.arange(3), labels[0]]
    scores = Engine(model).score([(source[0][:-1], [3, 4])])
    np.testing.assert_allclose(scores[0], expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="the source is 23 tokens; accepted: up to max_length, 22"):
        model.logits(np.zeros((1, 23), np.int32), tokens)


def test_files_are_saved_as_they_were(tmp_path):
    model, tokenizer = gpuattn.load_pretrained(SWISH), gpuattn.load_tokenizer(SWISH)
    gpuattn.save_pretrained(model, tmp_path / "out", tokenizer)
    names = {"source.spm", "target.spm", "vocab.json", "generation_config.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names | {
        "config.json", "model.safetensors"
    }  # fmt: skip
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (SWISH / name).read_bytes()


@pytest.mark.parametrize("key, value, accepted", [
    ("early_stopping", "soon", "false, true or 'never'"), ("do_sample", True, "False"),
    ("bad_words_ids", [3], "a list of lists of tokens"), ("num_beam_groups", 2, "1"),
    ("max_length", "long", "a whole number"), ("renormalize_logits", 1, "true or false"),
])  # fmt: skip
def test_settings_of_a_search_that_are_refused(copy, key, value, accepted):
    folder = copy("generation_config.json", **{key: value})
    with pytest.raises(PretrainedError) as caught:
        gpuattn.load_run(folder, device="numpy")
    (fault,) = caught.value.faults
    assert fault.startswith(f"generation_config.json: {key} is {value!r}; accepted: {accepted}")


def test_settings_out_of_range_are_sentences(copy):
    for key, value in {"num_beams": 0, "length_penalty": "x", "eos_token_id": "x"}.items():
        folder = copy("generation_config.json", **{key: value})
        with pytest.raises(PretrainedError, match="generation_config.json: beam_search: "):
            search_settings(folder, 0)


def test_old_folders_have_the_settings_in_their_config(copy):
    old = {"num_beams": 6, "max_length": 9, "bad_words_ids": [[66], [1, 2]], "init_std": 0.02,
           "forced_eos_token_id": 0, "static_position_embeddings": True}  # fmt: skip
    folder = copy("config.json", **old)
    (folder / "generation_config.json").unlink()
    with pytest.warns(UserWarning, match="bad_words_ids of several tokens are not used") as caught:
        translator = gpuattn.load_run(folder, device="numpy")
    assert len(caught) == 1
    assert translator.search.beam == 6 and translator.most == 8
    assert translator.search.banned == (66,) and translator.search.stopping == "hf"


def test_settings_of_a_search_have_a_way_back(tmp_path):
    config = TranslationConfig(9, 8, 2, (1, 1), 8, max_length=30)
    for rule in ("hf", "hf-early", "hf-never"):
        search = BeamOptions(eos=2, banned=(0, 3), beam=3, length_penalty=0.7, stopping=rule,
                             no_repeat_ngram=2, min_length=4, repetition_penalty=1.1)  # fmt: skip
        for name, data in describe_search(search, config, 0).items():
            (tmp_path / name).write_bytes(data)
        assert search_settings(tmp_path, 1) == (search, 29)


def test_damaged_tokenizers(copy):
    folder = copy("vocab.json", other=3)
    with pytest.raises(PretrainedError, match="vocab.json is no vocabulary; accepted: an object"):
        gpuattn.load_tokenizer(folder)
    (folder / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(PretrainedError, match="vocab.json has no </s> and no <unk>"):
        gpuattn.load_tokenizer(folder)
    (folder / "target.spm").write_bytes(b"another")
    (folder / "vocab.json").write_text('{"</s>": 0, "<unk>": 1}')
    with pytest.raises(PretrainedError, match="target.spm: 7 bytes that are no SentencePiece"):
        gpuattn.load_tokenizer(folder)
    (folder / "vocab.json").unlink()
    with pytest.raises(PretrainedError, match="vocab.json: No such file"):
        gpuattn.load_tokenizer(folder)


def test_a_translator_made_here_becomes_a_folder(tmp_path):
    lines = ["the cat sat on the mat", "a rat ate the hat"]
    tokenizer = Tokenizer.train(lines, 300)
    model = TranslationModel(TranslationConfig(
        len(tokenizer), 16, 2, (1, 2), 24, norm="post", positions="sinusoidal_halves",
        activation="silu", max_length=30,
    ), 3).eval()  # fmt: skip
    gpuattn.save_pretrained(model, tmp_path / "out", tokenizer)
    translator = gpuattn.load_run(tmp_path / "out", device="numpy")
    assert translator.search.banned == (0, 1, 3) and translator.model.config.eos == 2
    own = translator.tokenizer
    for line in [*lines, "Zebra\u00e9"]:
        assert own.encode(line) == own.target.encode(line) == tokenizer.encode(line)
        assert own.decode(tokenizer.encode(line)) == line
    state = model.state()
    for name, values in translator.model.state().items():
        assert values.tobytes() == state[name].tobytes()


def test_what_marian_lacks(tmp_path):
    model = TranslationModel(TranslationConfig(9, 8, 2, (1, 1), 8, kv_heads=1, tied=False))
    with pytest.raises(ConfigError, match="norm is pre .*--norm post.*positions is sinusoidal.*"
                                          "kv_heads is 1 .*tied is False"):  # fmt: skip
        gpuattn.save_pretrained(model, tmp_path / "out")


def test_keys_and_values_of_all_layers_are_one_matrix(tmp_path):
    model = gpuattn.load_pretrained(SWISH, device="numpy")
    tensors = load_file(SWISH / "model.safetensors")
    name = "model.decoder.layers.1.encoder_attn.{}_proj.weight"
    rows = model.memory.kv.weight.data.reshape(2, 2, 24, 24)
    np.testing.assert_array_equal(rows[1, 0], tensors[name.format("k")])
    np.testing.assert_array_equal(rows[1, 1], tensors[name.format("v")])
