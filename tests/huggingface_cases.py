"""Tiny configurations of Hugging Face's architectures, as `hf:config.json` takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
STACK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {**TEXT, **STACK, "max_position_embeddings": 64}
LLAMA = {**BERT, "num_key_value_heads": 1}
VISION = {**STACK, "image_size": 32, "patch_size": 8}
T5 = {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    **TEXT,
    "decoder_start_token_id": 2,
    "d_model": 32,
    "max_position_embeddings": 64,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 24}
CONVOLUTIONS = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
WAV2VEC2 = {**TEXT, **STACK, **CONVOLUTIONS, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
CLIP = {"text_config": LLAMA, "vision_config": VISION, "projection_dim": 16}
GPT2 = {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAVA = {
    "text_config": {**LLAMA, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "image_token_index": 99,
    "image_seq_length": 16,
}
EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
DEEPSEEK_PARTS = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {**EXPERTS, "num_key_value_heads": 2, **DEEPSEEK_PARTS}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "image_size": 32,
    "num_labels": 3,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "GPT2ForSequenceClassification": ("gpt2", {**GPT2, "pad_token_id": None}),
    "LlamaForCausalLM": ("llama", LLAMA),
    "MistralForCausalLM": ("mistral", {**LLAMA, "sliding_window": 8}),
    "Qwen2ForCausalLM": ("qwen2", LLAMA),
    "Qwen3ForCausalLM": ("qwen3", {**LLAMA, "head_dim": 16}),
    "Gemma2ForCausalLM": ("gemma2", {**LLAMA, "head_dim": 16}),
    "PhiForCausalLM": ("phi", BERT),
    "GPTNeoXForCausalLM": ("gpt_neox", BERT),
    "OPTForCausalLM": ("opt", {**BERT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BloomForCausalLM": ("bloom", {**TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "FalconForCausalLM": ("falcon", BERT),
    "MambaForCausalLM": ("mamba", {**TEXT, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}),
    "MixtralForCausalLM": ("mixtral", {**EXPERTS, "num_local_experts": 6}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 24}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**EXPERTS, "num_experts": 6, "head_dim": 16}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", DEEPSEEK),
    "BertForPreTraining": ("bert", BERT),
    "BertForMaskedLM": ("bert", BERT),
    "BertForMultipleChoice": ("bert", BERT),
    "BertForNextSentencePrediction": ("bert", BERT),
    "BertForQuestionAnswering": ("bert", BERT),
    "BertForTokenClassification": ("bert", {**BERT, "num_labels": 5}),
    "RobertaForSequenceClassification": ("roberta", {**BERT, "max_position_embeddings": 66}),
    "DistilBertForSequenceClassification": (
        "distilbert",
        {
            **TEXT,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 64,
            "problem_type": "multi_label_classification",
        },
    ),
    "AlbertForMaskedLM": ("albert", {**BERT, "embedding_size": 16}),
    "ElectraForPreTraining": ("electra", {**BERT, "embedding_size": 16}),
    "DebertaV2ForSequenceClassification": ("deberta-v2", {**BERT, "num_labels": 1}),
    "DebertaForMaskedLM": ("deberta", {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "LayoutLMForTokenClassification": ("layoutlm", BERT),
    "T5ForConditionalGeneration": ("t5", T5),
    "T5Model": ("t5", T5),
    "BartForConditionalGeneration": ("bart", BART),
    "PegasusForConditionalGeneration": ("pegasus", BART),
    "MarianMTModel": ("marian", BART),
    "WhisperForConditionalGeneration": ("whisper", WHISPER),
    "Wav2Vec2ForCTC": ("wav2vec2", {**WAV2VEC2, "layerdrop": 0.1}),
    "Wav2Vec2ForSequenceClassification": ("wav2vec2", {**WAV2VEC2, "num_labels": 3}),
    "ViTForImageClassification": ("vit", {**VISION, "num_labels": 7}),
    "ViTForMaskedImageModeling": ("vit", {**VISION, "encoder_stride": 8}),
    "DeiTForImageClassification": ("deit", {**VISION, "num_labels": 7}),
    "SwinForImageClassification": (
        "swin",
        {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
    ),
    "ResNetForImageClassification": (
        "resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32},
    ),
    "ConvNextForImageClassification": (
        "convnext",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64},
    ),
    "SegformerForSemanticSegmentation": ("segformer", SEGFORMER),
    "SiglipModel": ("siglip", {"text_config": {**LLAMA, "projection_size": 32}, "vision_config": VISION}),
    "CLIPModel": ("clip", CLIP),
    "LlavaForConditionalGeneration": ("llava", LLAVA),
    "ViltForQuestionAnswering": ("vilt", {**BERT, **VISION, "num_labels": 5}),
    "BlipForQuestionAnswering": ("blip", {"text_config": BERT, "vision_config": VISION}),
}


def write(folder: Path, architecture: str | None, model_type: str, sizes: dict[str, Any]) -> str:
    """Write a configuration and return what `--model` takes."""
    named = {} if architecture is None else {"architectures": [architecture]}
    path = folder / "config.json"
    path.write_text(json.dumps({**named, "model_type": model_type, **sizes}))
    return f"hf:{path}"


def length_of(architecture: str) -> int | None:
    """Return a length that leaves room for the 16 tokens of Llava's image; models of images alone have none."""
    return None if "Image" in architecture or "Segmentation" in architecture else 18
