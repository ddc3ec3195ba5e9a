"""Encoders of text, and encoder-decoders, of transformers."""

from __future__ import annotations

from typing import Any

from .architecture import LENGTH, Architecture, described, ids, left_padded, noise

_LONG = 16  # attention in windows or blocks needs more tokens than one of them


def _right_padded(length: int = LENGTH) -> dict[str, Any]:
    import torch

    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids(length=length), "attention_mask": mask}


def _translated(length: int = LENGTH) -> dict[str, Any]:
    return _right_padded(length) | {"decoder_input_ids": ids(length=3)}


encoder = described("encoder", _right_padded)
seq2seq = described("encoder-decoder", _translated, left_padded)


def speech2text(name: str, model: str, features: tuple[int, ...], **overrides: Any) -> Architecture:
    """Describe an encoder-decoder of speech."""

    def heard() -> dict[str, Any]:
        return {"input_features": noise(2, *features)}

    return described("encoder-decoder", lambda: heard() | {"decoder_input_ids": ids(length=3)}, heard)(
        name, model, **overrides
    )


_MASKED = {
    "albert": "Albert",
    "bert": "Bert",
    "camembert": "Camembert",
    "convbert": "ConvBert",
    "data2vec-text": "Data2VecText",
    "deberta": "Deberta",
    "distilbert": "DistilBert",
    "ernie": "Ernie",
    "eurobert": "EuroBert",
    "fnet": "FNet",
    "funnel": "Funnel",
    "ibert": "IBert",
    "layoutlm": "LayoutLM",
    "megatron-bert": "MegatronBert",
    "mobilebert": "MobileBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "rembert": "RemBert",
    "roberta": "Roberta",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "roformer": "RoFormer",
    "squeezebert": "SqueezeBert",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRobertaXL",
}
_FROM_ZERO = {"decoder_start_token_id": 0}

ENCODERS: list[Architecture] = [
    *(encoder(name, f"{stem}ForMaskedLM") for name, stem in _MASKED.items()),
    encoder("electra", "ElectraForPreTraining"),
    encoder("bert_embeddings", "BertModel", "bert"),
    encoder("minilm", "BertForSequenceClassification", "bert", num_hidden_layers=3),
    encoder("deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("esm", "EsmForMaskedLM", mask_token_id=32, position_embedding_type="rotary"),
    described("encoder", lambda: _right_padded(_LONG))(
        "longformer", "LongformerForMaskedLM", attention_window=4
    ),
    described("encoder", lambda: _right_padded(64))(
        "big_bird", "BigBirdForMaskedLM", block_size=4, num_random_blocks=1
    ),
]

SEQ2SEQ: list[Architecture] = [
    seq2seq("t5", "T5ForConditionalGeneration", **_FROM_ZERO),
    seq2seq(
        "t5_gated",
        "T5ForConditionalGeneration",
        "t5",
        feed_forward_proj="gated-gelu",
        **_FROM_ZERO,
    ),
    seq2seq("mt5", "MT5ForConditionalGeneration", **_FROM_ZERO),
    seq2seq("umt5", "UMT5ForConditionalGeneration", **_FROM_ZERO),
    seq2seq("longt5", "LongT5ForConditionalGeneration", local_radius=3, **_FROM_ZERO),
    seq2seq("bart", "BartForConditionalGeneration"),
    seq2seq("mbart", "MBartForConditionalGeneration"),
    seq2seq("mvp", "MvpForConditionalGeneration"),
    seq2seq("marian", "MarianMTModel", decoder_vocab_size=320),
    seq2seq("pegasus", "PegasusForConditionalGeneration"),
    seq2seq("pegasus_x", "PegasusXForConditionalGeneration", block_size=4, num_global_tokens=4),
    seq2seq("blenderbot", "BlenderbotForConditionalGeneration"),
    seq2seq("plbart", "PLBartForConditionalGeneration"),
    seq2seq("prophetnet", "ProphetNetForConditionalGeneration", num_encoder_layers=2),
    described("encoder-decoder", lambda: _translated(_LONG), lambda: _right_padded(_LONG))(
        "led",
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=64,
    ),
    seq2seq("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    seq2seq("m2m_100", "M2M100ForConditionalGeneration"),
    seq2seq("nllb-moe", "NllbMoeForConditionalGeneration", encoder_sparse_step=2, decoder_sparse_step=2),
    seq2seq(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    seq2seq(
        "fsmt", "FSMTForConditionalGeneration", src_vocab_size=320, tgt_vocab_size=320, langs=["en", "de"]
    ),
    speech2text(
        "whisper",
        "WhisperForConditionalGeneration",
        (16, 64),
        num_mel_bins=16,
        max_source_positions=32,
        begin_suppress_tokens=None,
    ),
    speech2text(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        (40, 16),
        input_feat_per_channel=16,
        conv_channels=64,
    ),
]
