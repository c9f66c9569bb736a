"""Runs that begin with a folder of Hugging Face: options, frozen parts, continuing, exporting."""

import json

import numpy as np
import pytest
from fake_runs import training_on
from safetensors.numpy import load_file

import gpuattn
from gpuattn.cli.main import main
from gpuattn.data.class_names import ClassNames
from gpuattn.data.tokenizer import CharTokenizer, Tokenizer
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import generation
from gpuattn.errors import ConfigError, DataError
from gpuattn.models import (
    GPT2,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    RotaryScaling,
    TranslationConfig,
    TranslationModel,
    ViT,
    ViTConfig,
)
from gpuattn.runs.config import resolve
from gpuattn.runs.fine_tuning import fine_tuning
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.runtime import checkpoint
from gpuattn.tasks.users import engines
from gpuattn.train.session import train

TEXT = "the cat sat on the mat; a rat ate the hat\n"
CHARS = CharTokenizer.train([TEXT])
WORDS = Tokenizer.train([TEXT, TEXT.upper()], 300)
MODELS = {
    "gpt2": (GPT2(GPT2Config(len(CHARS), 16, 2, 2, 12, eps=1e-3, inner=20, tied=False), 1), CHARS),
    "llama": (Llama(LlamaConfig(
        len(CHARS), 16, 5, 2, 12, 20, kv_heads=1, head_dim=6, qk_norm=True, base=50.0,
        scaling=RotaryScaling("yarn", 4.0, 5, 0.5, 2.0, scale=1.3),
    ), 2), CHARS),
    "bert": (Bert(BertConfig(
        len(CHARS), 16, 2, 2, 20, max_length=12, types=1, dropout=0.1, activation="gelu", eps=1e-3,
        pooler=False, masked=True,
    ), 5), CHARS),
    "translation": (TranslationModel(TranslationConfig(
        len(WORDS), 16, 2, (1, 2), 20, norm="post", positions="sinusoidal_halves",
        activation="silu", max_length=40, output_bias=True,
    ), 3), WORDS),
    "vit": (ViT(ViTConfig(
        3, 6, 3, 1, 16, 2, 2, 20, stochastic_depth=0.0, activation="gelu", eps=1e-3,
        mean=(0.4,), std=(0.3,),
    ), 4), ClassNames(["bird", "cat", "rat"])),
}  # fmt: skip
FROZEN = {"gpt2": "embedding,layers.0.*", "llama": "layers.*.attention",
          "translation": "source,encoder", "bert": "types,layers.0",
          "vit": "patch,positions,layers.0"}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder for each of MODELS, ``text`` for language models, ``src`` and ``tgt``, images."""
    root = tmp_path_factory.mktemp("fine_tuning")
    for name, (model, tokenizer) in MODELS.items():
        gpuattn.save_pretrained(model, root / name, tokenizer)
    (root / "text").write_text(TEXT * 30)
    lines = [" ".join(np.random.default_rng(i).permutation(TEXT.split()[:5])) for i in range(40)]
    (root / "src").write_text("".join(f"{line}\n" for line in lines))
    (root / "tgt").write_text("".join(f"{line.upper()}\n" for line in lines))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    for name, labels in (("images", ["cat", "bird"]), ("others", ["cat", "dog"])):
        np.savez(root / f"{name}.npz", images=pixels, labels=np.array(labels * 20))
    return root


def config_of(files, name, **options):
    data = {
        "translation": {"source": str(files / "src"), "target": str(files / "tgt")},
        "vit": {"images": str(files / "images.npz"), "batch": 16},
    }.get(name, {"lm": str(files / "text")})
    defaults, has = fine_tuning(files / name)
    given = {"batch": 200, "length": "4u", "lr": 1e-2, "origin": str(files / name)} | data
    return resolve(("", defaults), ("", given | options), ("", has), device="numpy")[0]


def run(config, out, stop_after=None):
    seen = iter(range(100))
    stop = None if stop_after is None else lambda: next(seen) + 1 >= stop_after
    return train(config, out, device="numpy", stop=stop)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_begins_with_a_folder_and_continues(files, tmp_path, name):
    config = config_of(files, name, freeze=FROZEN[name])
    assert config.model == name and config.dim == 16
    assert run(config, tmp_path / "whole").finished
    assert not run(config, tmp_path / "parts", stop_after=2).finished
    assert run(config, tmp_path / "parts").finished
    whole, parts = (checkpoint.load(tmp_path / p, "last")[0] for p in ("whole", "parts"))
    before = MODELS[name][0].state()
    model = type(MODELS[name][0])(MODELS[name][0].config).freeze(*FROZEN[name].split(","))
    learnt = dict(model.named_parameters())
    assert whole.keys() == before.keys() == parts.keys() and 0 < len(learnt) < len(before)
    for path, values in whole.items():
        assert values.tobytes() == parts[path].tobytes(), path
        assert (values.tobytes() == before[path].tobytes()) == (path not in learnt), path
    state = checkpoint.load(tmp_path / "whole", "state")[0]
    moments = {key.partition(":")[2] for key in state if key.startswith("exp_avg:")}
    assert moments == set(learnt)


@pytest.mark.parametrize("name", MODELS)
def test_a_fine_tuned_run_is_used_and_exported(files, tmp_path, name):
    out, folder = tmp_path / "run", tmp_path / "folder"
    run(config_of(files, name, length="2u"), out)
    user = load_run(out, device="numpy")
    assert user.model.config == gpuattn.load_pretrained(files / name, device="numpy").config
    gpuattn.save_pretrained(user.model, folder, user.tokenizer)
    old, new = (load_file(path / "model.safetensors") for path in (files / name, folder))
    assert old.keys() == new.keys()
    configs = [json.loads((path / "config.json").read_text()) for path in (files / name, folder)]
    assert configs[0] == configs[1]
    other = load_run(folder, device="numpy")
    if name == "translation":
        lines = ["the cat sat", "mat on the"]
        assert user.translate(lines, beam=1) == other.translate(lines, beam=1)
    elif name == "vit":
        both = [path / "preprocessor_config.json" for path in (files / name, folder)]
        assert both[0].read_bytes() == both[1].read_bytes()
        labels = [each.classify(files / "images.npz") for each in (user, other)]
        assert labels[0] == labels[1] and user.tokenizer.names == ("bird", "cat", "rat")
    elif name == "bert":
        vectors = [each.embed(["the cat", "a rat"]) for each in (user, other)]
        assert vectors[0].tobytes() == vectors[1].tobytes()
    else:
        texts = [each.sample("the", tokens=9, temperature=0) for each in (user, other)]
        assert texts[0] == texts[1]
    RunFolder(out).new_model(user.config, user.tokenizer).load_state(user.model.state())


@pytest.mark.filterwarnings("ignore")  # of numbers that were never computed
@pytest.mark.parametrize("name", [
    "translation", *(pytest.param(name, marks=pytest.mark.exhaustive)
                     for name in ("gpt2", "llama", "bert", "vit"))
])  # fmt: skip
def test_a_frozen_part_on_a_fake_gpu(files, tmp_path, monkeypatch, name):
    """All gradients that the frozen part leaves find their kernels, which compile ahead."""

    def hypotheses(search, read, slots, limits=()):
        return [[Hypothesis([1] * 120, 0.0, 0.0, False)] for _ in slots]  # the fake GPU wrote none

    monkeypatch.setattr(generation.Generation, "hypotheses", hypotheses)
    monkeypatch.setattr(engines, "rehearse", lambda work: None)
    with training_on("9.0") as gpu:
        train(config_of(files, name, freeze=FROZEN[name]), tmp_path / "run", device="cuda")
    assert gpu.launched() == gpu.rehearsed and ("update/adamw.cu" in dict(gpu.rehearsed))


def test_options_that_do_not_fit(files, tmp_path, capsys):
    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["train", *map(str, arguments), "--device", "numpy", "--out", str(tmp_path / "x")])
        assert ended.value.code == 2 and not (tmp_path / "x" / "config.toml").exists()
        return " ".join(capsys.readouterr().err.split())

    gpt2 = ["--from", files / "gpt2", "--lm", files / "text"]
    assert "--dim is for a new model; --from" in (text := refused(*gpt2, "--dim", 32))
    assert "has 16" in text
    assert "model is for a new model" in refused(*gpt2, "--model", "translation")
    assert "block is 99; accepted: up to 12, which" in refused(*gpt2, "--block", 99, "--batch", 200)
    assert "pattern is 'nosuch'; accepted: paths of" in refused(*gpt2, "--freeze", "nosuch")
    assert "--freeze * leaves nothing to train" in refused(*gpt2, "--freeze", "*")
    assert "--from and --init-from are given" in refused(*gpt2, "--init-from", files / "gpt2")
    vit = ["--from", files / "vit", "--images", files / "images.npz"]
    assert "--patch is for a new model" in refused(*vit, "--patch", 2)
    assert "patch is 3; accepted: a divisor of image, 4" in refused(*vit, "--image-size", 4)
    gpuattn.save_pretrained(Bert(BertConfig(9, 8, 2, 1, 12)), tmp_path / "bert")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--from", str(tmp_path / "bert"), "--lm", str(files / "text")])
    assert ended.value.code == 1 and "no head for masked tokens" in capsys.readouterr().err
    other = {"images": str(files / "images.npz"), "valid_images": str(files / "others.npz")}
    with pytest.raises(DataError, match="has 'dog' among its labels"):
        run(config_of(files, "vit", **other), tmp_path / "x")
    with pytest.raises(ConfigError, match="--from and --pairs are given; accepted: one of both"):
        config_of(files, "translation", source=None, target=None, pairs="stores/x")


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_run_may_have_another_dropout_than_its_folder(files, tmp_path, name):
    """It changes what is learnt, resumes bit for bit, and is saved with that of the folder."""
    depth = {"stochastic_depth": 0.4} if name == "vit" else {}
    config = config_of(files, name, dropout=0.2, **depth)
    assert config_of(files, name).dropout == 0
    assert run(config, tmp_path / "whole").finished
    assert not run(config, tmp_path / "parts", stop_after=2).finished
    assert run(config, tmp_path / "parts").finished
    run(config_of(files, name), tmp_path / "without")
    whole, parts, without = (
        checkpoint.load(tmp_path / p, "last")[0] for p in ("whole", "parts", "without")
    )
    for path, values in whole.items():
        assert values.tobytes() == parts[path].tobytes(), path
    assert any(values.tobytes() != without[path].tobytes() for path, values in whole.items())
    user = load_run(tmp_path / "whole", device="numpy")
    assert user.model.config == gpuattn.load_pretrained(files / name, device="numpy").config


@pytest.mark.parametrize("kind", ["classes", "classes and size", "encoder"])
def test_images_of_other_classes_or_another_size(files, tmp_path, capsys, kind):
    """The head is new, the other weights begin as those of the folder; used, continued, exported
    and loaded as any other."""
    begin = files / "vit"
    if kind == "encoder":
        begin = tmp_path / "encoder"
        model = ViT(ViTConfig(0, 6, 3, 1, 16, 2, 2, 20, activation="gelu", mean=(0.4,), std=(0.3,)))
        gpuattn.save_pretrained(model, begin)

    def said(arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        assert not ended.value.code
        return " ".join(capsys.readouterr().err.split())

    before = gpuattn.load_pretrained(begin, device="numpy")
    out, shared = tmp_path / "run", ["--device", "numpy", "--out", tmp_path / "run"]
    size = ["--image-size", "3"] if kind == "classes and size" else []
    given = ["train", "--from", begin, "--images", files / "others.npz", "--batch", 16,
             "--freeze", "layers,patch,norm,positions", *size, *shared]  # fmt: skip
    told = said([*given, "--for", "2u"])
    has = "none" if kind == "encoder" else "other classes"
    assert f"the head is new, for 'cat', 'dog': {begin} has {has}" in told
    assert ("interpolated from images of 6 pixels" in told) == bool(size)
    told = said([*given, "--for", "3u"])
    assert "continuing from update 2" in told and "the head is new" not in told
    user = load_run(out, device="numpy")
    assert user.tokenizer.names == ("cat", "dog") and user.model.config.classes == 2
    assert user.model.config.image == (3 if size else 6) and user.model.config.mean == (0.4,)
    after = user.model.state()
    for path, values in before.state().items():
        if (
            not path.startswith("head")
            and path != "class_token"
            and (path, bool(size)) != ("positions", True)
        ):
            assert values.tobytes() == after[path].tobytes(), path
    said(["export", out, tmp_path / "folder"])
    there = load_run(tmp_path / "folder", device="numpy")
    labels = [each.classify(files / "images.npz") for each in (user, there)]
    assert labels[0] == labels[1] and there.tokenizer.names == ("cat", "dog")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog"}
    assert config["architectures"] == ["ViTForImageClassification"]
    beside = json.loads((tmp_path / "folder" / "preprocessor_config.json").read_text())
    assert beside["size"] == {"height": user.model.config.image, "width": user.model.config.image}


@pytest.mark.parametrize("marks", [("[CLS]", "[SEP]"), ("[CLS]",), None])
def test_bert_and_its_own_tokenizer(files, tmp_path, marks):
    library = pytest.importorskip("tokenizers", reason="pip install 'gpuattn[pretrained]'")
    mask = ["[MASK]"] if marks else []
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *mask, *sorted(set(TEXT.replace(";", "").split()))]
    numbers = {word: i for i, word in enumerate(words)}
    own = library.Tokenizer(library.models.WordLevel(numbers, unk_token="[UNK]"))
    own.pre_tokenizer = library.pre_tokenizers.Whitespace()
    own.add_special_tokens(words[: 4 + len(mask)])
    around = [(mark, numbers[mark]) for mark in marks or ("[CLS]", "[SEP]")]
    own.post_processor = library.processors.TemplateProcessing(
        single=" ".join(["[CLS]", "$A", "[SEP]"][: 1 + len(around)]), special_tokens=around
    )
    files_of_it = {"tokenizer.json": own.to_str().encode()}
    tokenizer = gpuattn.pretrained.tokens.PretrainedTokenizer(files_of_it)
    folder, out = tmp_path / "bert", tmp_path / "run"
    sizes = BertConfig(len(words), 16, 2, 1, 20, max_length=8, masked=True, pooler=True)
    gpuattn.save_pretrained(Bert(sizes), folder, tokenizer)
    defaults, has = fine_tuning(folder)
    assert defaults["block"] == 8 and defaults["dropout"] == 0.1
    given = {"lm": str(files / "text"), "origin": str(folder), "length": "2u", "batch": 64}
    config = resolve(("", defaults), ("", given), ("", has), device="numpy")[0]
    if len(marks or ()) < 2:
        fault = "puts 1 marks around a line" if marks else "has no mask token"
        with pytest.raises(ConfigError, match=f"its tokenizer {fault}; accepted: "):
            run(config, out)
        return
    run(config, out)
    user = load_run(out, device="numpy")
    assert user.tokenizer.files == files_of_it and user.model.pooler is None
    gpuattn.save_pretrained(user.model, tmp_path / "new", user.tokenizer)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["architectures"] == ["BertForMaskedLM"]
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == files_of_it["tokenizer.json"]
    other = load_run(tmp_path / "new", device="numpy")
    assert other.embed(["the cat sat"]).tobytes() == user.embed(["the cat sat"]).tobytes()


def test_a_killed_run_with_a_new_head_begins_anew(files, tmp_path):
    """As many classes as the folder has, and others: the run knows them, the folder's head not."""
    pixels = np.random.default_rng(1).integers(0, 256, (30, 6, 6), np.uint8)
    np.savez(tmp_path / "three.npz", images=pixels, labels=np.array(["eel", "fox", "gnu"] * 10))
    config = config_of(files, "vit", images=str(tmp_path / "three.npz"), length="2u")
    run(config, tmp_path / "run")
    whole = checkpoint.load(tmp_path / "run", "last")[0]
    for path in tmp_path.glob("run/*-*"):  # killed before it saved anything
        path.unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert checkpoint.generations(tmp_path / "run", "state") == []
    run(config, tmp_path / "run")
    again = checkpoint.load(tmp_path / "run", "last")[0]
    assert all(values.tobytes() == again[path].tobytes() for path, values in whole.items())
    assert load_run(tmp_path / "run", device="numpy").tokenizer.names == ("eel", "fox", "gnu")


def test_a_run_of_a_folder_gives_its_weights_by_its_export_alone(files, tmp_path, capsys):
    run(config_of(files, "gpt2", length="1u"), tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["train", "--init-from", str(tmp_path / "run"), "--lm", str(files / "text"),
              "--device", "numpy", "--out", str(tmp_path / "next")])  # fmt: skip
    assert "Export it (gpuattn export), and begin with that folder" in capsys.readouterr().err
