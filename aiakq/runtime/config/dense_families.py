"""The keys of the dense families, see family_keys.py."""

from __future__ import annotations

from aiakq.runtime.config.family_keys import ATTENTION_BIAS, MULTIPLIERS, QWEN_WINDOW, WINDOW, Family, llama_keys

_GPT2_SIZES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_GPT2: dict[str, object] = {
    "n_positions": 1024,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_GPT2_ALIASES = {**_GPT2_SIZES, "max_position_embeddings": "n_positions"}

#: Keys of EAGLE-3 heads, which eagle3.py reads.
_HEAD = {
    *(
        "draft_vocab_size",
        "target_hidden_size",
        "target_model_type",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
    ),
    *("num_aux_hidden_states", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "logit_scale"),
    *("transformer_layer_config", "speculators_config", "speculators_model_type", "parallel_drafting"),
    *("embed_requires_grad", "has_no_defaults_at_init", "compression_config", "target_model", "draft_length"),
}

DENSE: dict[str, Family] = {
    "eagle3": Family(
        llama_keys(**ATTENTION_BIAS, mlp_bias=False, sliding_window=None, layer_types=None),
        unread=frozenset(_HEAD | {"use_sliding_window", "max_window_layers", "sliding_window_pattern"}),
    ),
    "llama": Family(llama_keys(**ATTENTION_BIAS, mlp_bias=False)),
    "mistral": Family(
        llama_keys(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096)
    ),
    "qwen2": Family(
        llama_keys(intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768, **QWEN_WINDOW)
    ),
    "mimo": Family(
        llama_keys(intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768, **QWEN_WINDOW),
        fixed={"attention_bias": (True,)},
    ),
    "qwen3": Family(
        llama_keys(
            intermediate_size=22016,
            num_key_value_heads=32,
            head_dim=128,
            max_position_embeddings=32768,
            **ATTENTION_BIAS,
            **QWEN_WINDOW,
        )
    ),
    "opt": Family(
        {
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
        fixed={"layer_norm_elementwise_affine": (True,)},
        rotary=False,
    ),
    "xglm": Family(
        {
            "ffn_dim": 4096,
            "max_position_embeddings": 2048,
            "activation_function": "gelu",
            "scale_embedding": True,
            "tie_word_embeddings": True,
        },
        aliases={"d_model": "hidden_size", "attention_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
        fixed={"add_cross_attention": (False,)},
        rotary=False,
    ),
    # With the spelling of speech.py; sizes of the encoder are checked where it is loaded.
    "whisper": Family(
        {
            "num_key_value_heads": None,
            "intermediate_size": 1536,
            "max_position_embeddings": 448,
            "max_source_positions": 1500,
            "num_mel_bins": 80,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "activation_function": "gelu",
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
        },
        fixed={"is_encoder_decoder": (True,)},
        # Of other models with its encoder, of its training, and of the times of words; transformers' modules multiply
        # nothing by the scale.
        unread=frozenset(
            {"use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment", "median_filter_width"}
            | {"scale_embedding"}
            | {f"mask_{part}_{key}" for part in ("time", "feature") for key in ("prob", "length", "min_masks")}
        ),
        rotary=False,
    ),
    "gemma": Family(
        llama_keys(
            intermediate_size=24576,
            num_key_value_heads=16,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            use_bidirectional_attention=None,
            **ATTENTION_BIAS,
        ),
        fixed={"use_bidirectional_attention": (False,)},
        # transformers 4 used it instead of hidden_act; both are the tanh approximation in every published file.
        unread=frozenset({"hidden_activation"}),
    ),
    "gemma2": Family(
        llama_keys(
            ("hidden_act",),
            intermediate_size=9216,
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256.0,
            final_logit_softcapping=30.0,
            attn_logit_softcapping=50.0,
            use_bidirectional_attention=None,
            **ATTENTION_BIAS,
            **WINDOW,
        ),
        fixed={"use_bidirectional_attention": (False,)},
        unread=frozenset({"hidden_act", "cache_implementation"}),
        period=2,
    ),
    "gemma3_text": Family(
        llama_keys(
            ("hidden_act",),
            intermediate_size=9216,
            num_key_value_heads=4,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256.0,
            final_logit_softcapping=None,
            attn_logit_softcapping=None,
            use_bidirectional_attention=False,
            sliding_window_pattern=None,
            rope_local_base_freq=None,
            **ATTENTION_BIAS,
            **WINDOW,
        ),
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
        fixed={"attn_logit_softcapping": (), "use_bidirectional_attention": (False,)},
        unread=frozenset({"hidden_act", "cache_implementation"}),
        theta=1e6,
        period=6,
    ),
    **dict.fromkeys(
        ("glm", "glm4"),
        Family(
            llama_keys(
                intermediate_size=13696,
                num_key_value_heads=2,
                head_dim=128,
                max_position_embeddings=131072,
                rms_norm_eps=1.5625e-07,
                attention_bias=True,
            ),
            rotated=0.5,
        ),
    ),
    "cohere": Family(
        llama_keys(
            ("rms_norm_eps",),
            intermediate_size=22528,
            logit_scale=0.0625,
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            tie_word_embeddings=True,
            use_qk_norm=False,
            **ATTENTION_BIAS,
        ),
        theta=5e5,
    ),
    "cohere2": Family(
        llama_keys(
            ("rms_norm_eps",),
            intermediate_size=22528,
            logit_scale=0.0625,
            max_position_embeddings=8192,
            layer_norm_eps=1e-5,
            tie_word_embeddings=True,
            sliding_window_pattern=None,
            **ATTENTION_BIAS,
            **WINDOW,
        ),
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
        unread=frozenset({"cache_implementation", "order_of_interleaved_layers"}),
        period=4,
    ),
    "gptj": Family(
        {**_GPT2, "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
        aliases=_GPT2_ALIASES,
        unread=frozenset({"rotary"}),
        rotary=False,
    ),
    "bloom": Family(
        {
            "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": False,
            "tie_word_embeddings": True,
        },
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
        rotary=False,
    ),
    "mpt": Family(
        {
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "layer_norm_epsilon": 1e-5,
            "learned_pos_emb": True,
            "attn_config": None,
            "logit_scale": None,
            "no_bias": True,
            "embedding_fraction": 1.0,
            "norm_type": "low_precision_layernorm",
            "tie_word_embeddings": True,
        },
        aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
        fixed={
            "logit_scale": (),
            "embedding_fraction": (1.0,),
            "norm_type": ("low_precision_layernorm", "layernorm"),
        },
        rotary=False,
    ),
    "falcon": Family(
        {
            "num_ln_in_parallel_attn": None,
            "layer_norm_epsilon": 1e-5,
            "num_kv_heads": None,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "max_position_embeddings": 2048,
            "ffn_hidden_size": None,
            "activation": "gelu",
            "tie_word_embeddings": True,
        },
        # Published files have the latter, which transformers' class does not read.
        fixed={"num_ln_in_parallel_attn": (1, 2), "apply_residual_connection_post_layernorm": (False,)},
    ),
    "phi3": Family(
        llama_keys(
            intermediate_size=8192,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        fixed={"full_attn_mod": (1,)},
    ),
    "phi": Family(
        llama_keys(
            ("rms_norm_eps",),
            intermediate_size=8192,
            hidden_act="gelu_new",
            layer_norm_eps=1e-5,
            qk_layernorm=False,
        ),
        unread=frozenset({"activation_function"}),
        rotated=0.5,
    ),
    "olmo2": Family(llama_keys(rms_norm_eps=1e-5, **ATTENTION_BIAS)),
    "olmo3": Family(
        llama_keys(rms_norm_eps=1e-5, **ATTENTION_BIAS, **WINDOW),
        theta=5e5,
        period=4,
    ),
    "exaone4": Family(
        llama_keys(
            intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window_pattern=4, **WINDOW
        )
    ),
    "granite": Family(llama_keys(mlp_bias=False, **ATTENTION_BIAS, **MULTIPLIERS)),
    "smollm3": Family(
        llama_keys(
            num_key_value_heads=4,
            max_position_embeddings=32768,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
            mlp_bias=False,
            tie_word_embeddings=True,
            **ATTENTION_BIAS,
        ),
        unread=frozenset({"max_window_layers"}),
        theta=2e6,
    ),
    "starcoder2": Family(
        llama_keys(
            ("rms_norm_eps",),
            intermediate_size=12288,
            num_key_value_heads=2,
            hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=4096,
            norm_epsilon=1e-5,
            sliding_window=None,
            use_bias=True,
            tie_word_embeddings=True,
        ),
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
        unread=frozenset({"activation_function"}),
    ),
    "gpt2": Family(
        {**_GPT2, "scale_attn_by_inverse_layer_idx": False},
        aliases=_GPT2_ALIASES,
        rotary=False,
    ),
    "gpt_bigcode": Family(
        {**_GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
        aliases=_GPT2_ALIASES,
        unread=frozenset({"inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"}),
        rotary=False,
    ),
    "stablelm": Family(
        llama_keys(
            ("rms_norm_eps",),
            intermediate_size=6912,
            num_key_value_heads=32,
            max_position_embeddings=4096,
            layer_norm_eps=1e-5,
            use_qkv_bias=False,
            qk_layernorm=False,
            use_parallel_residual=False,
        ),
        rotated=0.25,
    ),
    "codegen": Family(
        {**_GPT2, "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
        aliases=_GPT2_ALIASES,
        unread=frozenset({"n_ctx"}),
        rotary=False,
    ),
    "gpt_neo": Family(
        {
            "max_position_embeddings": 2048,
            "num_layers": 24,
            "intermediate_size": None,
            "attention_types": None,
            "window_size": 256,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        unread=frozenset({"attention_layers"}),
        rotary=False,
    ),
    "seed_oss": Family(
        llama_keys(
            intermediate_size=27648,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=524288,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
        )
    ),
    "ernie4_5": Family(
        llama_keys(
            intermediate_size=3072,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            use_bias=False,
        ),
        theta=5e5,
    ),
    "ministral": Family(
        llama_keys(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, **WINDOW)
    ),
    "ministral3": Family(
        llama_keys(
            intermediate_size=14336,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=262144,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        rope_keys=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    ),
}
