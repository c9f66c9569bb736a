"""BERT of transformers (``BertModel``, ``BertForMaskedLM``, ``BertForSequenceClassification``) as
``models.bert.Bert``.

Old files call weight and bias of LayerNorm gamma and beta.
"""

from pathlib import Path
from typing import Any

from gpuattn.data.class_names import LabelledTokenizer
from gpuattn.models.bert import Bert, BertConfig
from gpuattn.pretrained import files
from gpuattn.pretrained.architecture import Architecture, register, rule
from gpuattn.pretrained.labels import count_labels, numbered_labels, read_labels
from gpuattn.pretrained.settings import Settings
from gpuattn.pretrained.tokens import load_tokenizer
from gpuattn.typing import StrPath

ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
               "relu": "relu"}  # fmt: skip
MASKS, CLASSIFIER, OTHERS = r"cls\..*", r"classifier\..*", r"qa_outputs\..*"
HEADS = (MASKS, CLASSIFIER, OTHERS)
MASKED = ("BertForMaskedLM", "BertForPreTraining")
CLASSIFIES = "BertForSequenceClassification"
OF_TOKENS = ("BertForTokenClassification", "BertForMultipleChoice")  # other heads of that name


def configure(settings: Settings, names: set[str], task: str | None) -> BertConfig:
    """Return the BertConfig of a config.json and the heads among the tensors."""
    settings.only("position_embedding_type", "absolute")
    settings.only("is_decoder", False)
    settings.only("add_cross_attention", False)
    settings.only("chunk_size_feed_forward", 0)
    found = settings.get("architectures", [])
    kinds = found if isinstance(found, list) else []
    has_head = any(name.startswith("cls.predictions.") for name in names)
    if task == "masked" and not has_head:
        settings.faults.append(
            "there is no head for masked tokens (cls.predictions); accepted: a BertForMaskedLM or "
            "BertForPreTraining of transformers"
        )
    says = task is None and any(kind in MASKED for kind in kinds)
    labelled = task is None and any(name.startswith("classifier.") for name in names)
    labelled = task == "labels" or (labelled and not any(kind in OF_TOKENS for kind in kinds))
    classes, own = count_labels(settings), settings.get("classifier_dropout", None)
    return BertConfig(
        vocab=settings.size("vocab_size", 30522), d_model=settings.size("hidden_size", 768),
        heads=settings.size("num_attention_heads", 12),
        layers=settings.layers("num_hidden_layers", 12),
        ffn=settings.size("intermediate_size", 3072),
        max_length=settings.size("max_position_embeddings", 512),
        types=settings.size("type_vocab_size", 2),
        dropout=settings.dropout("hidden_dropout_prob"),
        attention_dropout=settings.dropout("attention_probs_dropout_prob"),
        activation=settings.choice("hidden_act", "gelu", ACTIVATIONS),
        eps=settings.eps("layer_norm_eps", 1e-12),
        pooler=labelled or any(name.startswith("pooler.") for name in names),
        masked=says or has_head,
        classes=classes if labelled else 0,
        classifier_dropout=None if own is None else settings.dropout("classifier_dropout"),
        tied=settings.flag("tie_word_embeddings", True),
    )  # fmt: skip


def describe(config: BertConfig) -> dict[str, Any]:
    """Return the keys of config.json."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    attention = config.dropout if config.attention_dropout is None else config.attention_dropout
    kind = "BertForMaskedLM" if config.masked else "BertModel"
    return {
        "architectures": [CLASSIFIES if config.classes else kind],
        "model_type": "bert", "vocab_size": config.vocab, "hidden_size": config.d_model,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "intermediate_size": config.ffn, "hidden_act": names[config.activation],
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": attention,
        "max_position_embeddings": config.max_length, "type_vocab_size": config.types,
        "layer_norm_eps": config.eps, "tie_word_embeddings": config.tied,
        "classifier_dropout": config.classifier_dropout, **numbered_labels(config.classes),
    }  # fmt: skip


def tokenizer_of(folder: StrPath) -> Any:
    """Return the tokenizer of a folder, of a classifier with the names of its classes."""
    tokenizer = load_tokenizer(folder)
    kinds = files.read_config(Path(folder), []).get("architectures")
    if not isinstance(kinds, list) or CLASSIFIES not in kinds:
        return tokenizer
    return LabelledTokenizer(tokenizer, read_labels(folder).names)


register(Architecture(
    model_type="bert", model=Bert,
    tasks={
        "embedding": HEADS,
        "masked": (r"pooler\..*", r"cls\.seq_relationship\..*", CLASSIFIER),
        "labels": (MASKS, OTHERS),
    },
    classes=("BertModel", *MASKED, CLASSIFIES), heads={CLASSIFIES: "labels"},
    configure=configure, describe=describe, tokenizer=tokenizer_of,
    prefix="bert.", bare=HEADS, renamed={".gamma": ".weight", ".beta": ".bias"},
    rules=(
        rule("embeddings.word_embeddings.weight", "embedding.weight", padded=True),
        rule("embeddings.position_embeddings.weight", "embedding.position_weight"),
        rule("embeddings.token_type_embeddings.weight", "types"),
        rule("embeddings.LayerNorm.{p}", "embedding_norm.{p}"),
        rule("encoder.layer.{i}.attention.self.[query|key|value].{p}",
             "layers.{i}.attention.qkv.{p}"),
        rule("encoder.layer.{i}.attention.output.dense.{p}", "layers.{i}.attention.out.{p}"),
        rule("encoder.layer.{i}.attention.output.LayerNorm.{p}", "layers.{i}.norms.0.{p}"),
        rule("encoder.layer.{i}.intermediate.dense.{p}", "layers.{i}.feed_forward.inner.{p}"),
        rule("encoder.layer.{i}.output.dense.{p}", "layers.{i}.feed_forward.out.{p}"),
        rule("encoder.layer.{i}.output.LayerNorm.{p}", "layers.{i}.norms.1.{p}"),
        rule("pooler.dense.{p}", "pooler.{p}"),
        rule("classifier.{p}", "classifier.{p}"),
        rule("cls.predictions.transform.dense.{p}", "transform.{p}"),
        rule("cls.predictions.transform.LayerNorm.{p}", "transform_norm.{p}"),
        rule("cls.predictions.bias", "output_bias", padded=True),
        rule("cls.predictions.decoder.{p}", "output.{p}", padded=True),
    ),
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    kept={
        r"embeddings\.position_ids": "0, 1, 2, ...",
        r"cls\.predictions\.bias": "where it is not tied, decoder.bias is added in its place",
        r"cls\.seq_relationship\.(weight|bias)": "whether a sentence follows: of pre-training only",
    },
))  # fmt: skip
