"""Keys that change the training and that echelon does not support, with the reason shown to the user.

A file that sets one of them to a value other than null, false or the tool's default is refused.
"""

from collections.abc import Mapping

from echelon.recipe.foreign.ledger import Ledger

_REFUSED: Mapping[str, str] = {
    "training of reward models and classifiers is not supported.":
        "reward_model process_reward_model center_rewards_coefficient num_labels step_separator max_completion_length "
        "train_on_last_step_only reward_model_path reward_adapter reward_funcs reward_weights",
    "on-policy reinforcement learning is not supported.":
        "trl vllm ebft grpo num_generations num_iterations epsilon epsilon_high kl_coef cliprange gamma lam "
        "temperature "
        "generation_kwargs use_vllm num_ppo_epochs",
    "the only supported preference method is DPO.":
        "orpo_alpha cpo_alpha simpo_gamma desirable_weight undesirable_weight rl_adapter_ref_model lmbda seq_kd "
        "kto_tag",
    "DPO uses its standard loss with a fixed reference: the model before training.":
        "rpo_alpha pref_ftx pref_bco_weight ld_alpha dpo_norm_loss dpo_use_weighting use_weighting dpo_loss_weights "
        "loss_weights f_divergence_type f_alpha_divergence_coef sync_ref_model reference_free discopop_tau ref_model "
        "ref_model_adapters ref_model_quantization_bit ref_model_init_kwargs precompute_ref_log_probs_from",
    "the only supported loss is the plain next-token cross-entropy.":
        "use_dft_loss use_asft_loss use_eaft_loss use_eaft label_smoothing_factor kd_trainer kd_ce_alpha kd_alpha "
        "kd_temperature orthogonal_loss multi_token_prediction mtp router_aux_loss_coef moe_aux_loss_coef "
        "chunked_cross_entropy_num trainer_cls",
    "masked diffusion is not supported.": "diffusion",
    "experts on the CPU (KTransformers) are not supported.": "use_kt",
    "the batch size would be divided among the processes; remove it and set the batch size per process.":
        "split_batches batch_size",
    "the form of Muon's update is fixed.": "nesterov ns_steps",
    "noise on embeddings is not supported.": "neftune_noise_alpha noisy_embedding_alpha",
    "quantized or low-precision training of weights is not supported.":
        "qat use_onebitllms nvfp4_merge_aware dsv4_fp4_grouped_mode gptq gptq_bits quantization fp8_config "
        "fp8_enable_fsdp_float8_all_gather llmcompressor load_in_fp8",
    "the adapter determines which parameters are trained; without one, all are.":
        "unfrozen_parameters spectrum_top_fraction spectrum_model_name lisa_step_interval use_llama_pro "
        "freeze_language_model freeze_mm_modules train_mm_modules mixture_of_depths layers_to_freeze",
    "merging and restarting adapters during training is not supported.":
        "relora relora_steps",
    "restarts of the learning rate are not supported.":
        "jagged_restart_steps",
    "the supported optimizers are adamw, adamw_8bit, lion, muon and sgd.":
        "use_galore use_apollo use_badam use_adam_mini optim_target_modules optim_args came adam_beta3 adam_epsilon2",
    "an adapter has the same rank and alpha for all its modules.":
        "rank_pattern alpha_pattern lora_rank_pattern lora_alpha_pattern lora_layers_to_transform layers_to_transform "
        "peft_layers_to_transform layers_pattern peft_layers_pattern "
        "exclude_modules layer_replication peft_layer_replication use_qalora qalora_group_size peft loftq_config "
        "corda_config eva_config megatron_config trainable_token_indices peft_trainable_token_indices arrow_config "
        "use_bdlora lora_ga_config",
    "with an adapter, biases stay frozen.": "bias lora_bias",
    "training starts from model.checkpoint with a new adapter; only echelon's own runs can be resumed.":
        "lora_model_dir adapter_name_or_path peft_model_id create_new_adapter",
    "a checkpoint's config is used unchanged; write changes into its config.json.":
        "rope_scaling rope_theta model_config_overrides overrides_of_model_config overrides_of_model_kwargs "
        "model_config model_kwargs model_init_kwargs model_config_type",
    "changes to the model's code are not supported.": "s2_attention shift_attn llama4_linearized_experts",
    "the weights are loaded from model.checkpoint; to train a new model, set model.config.": "reinit_weights",
    "there is one learning rate, with factors by parameter name: optim.learning_rate_multipliers.":
        "embedding_lr embedding_lr_scale lr_groups",
    "the warm-up is linear, followed by a schedule of optim.schedule.":
        "lr_quadratic_warmup cosine_constant_lr_ratio warmup_lr_rate warmup_lr num_stable_steps",
    "echelon trains on text; images, audio and video are not supported.":
        "processor_type processor_config image_size image_max_pixels image_min_pixels image_resize_algorithm "
        "image_do_pan_and_scan video_max_pixels video_min_pixels video_fps video_maxlen crop_to_patches "
        "use_audio_in_video audio_sampling_rate media_dir images",
    "Axolotl has replaced it with sample_packing.": "max_packed_sequence_len",
    "samples are always shuffled.": "curriculum_sampling disable_shuffling train_sampling_strategy",
    "short samples are not dropped.": "min_sample_len",
    "data.train_on selects the trained turns of a conversation, each with the token that ends it.":
        "roles_to_train train_on_eos train_on_eot message_field_training_detail drop_system_message split_thinking "
        "field_thinking template_thinking_key train_on_split efficient_eos enable_thinking preserve_thinking",
    "records are read unchanged; transform the data before training.":
        "shards shards_idx input_format input_transform skip conversation field_human field_model logprobs_field "
        "tool_format truncation_mode chat_template_kwargs",
    "a Hub model or dataset is loaded at its newest revision; download the revision you need and give its folder.":
        "revision dataset_revision",
    "the tokenizer is used unchanged.":
        "tokenizer_legacy tokenizer_use_mistral_common added_tokens_overrides eos_token add_bos_token add_eos_token "
        "split_special_tokens",
}  # fmt: skip
REFUSED: Mapping[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names.split()}

PLUGINS = frozenset(
    f"axolotl.integrations.{name}"
    for name in (
        "liger.LigerPlugin", "liger.plugin.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin",
        "kernels.KernelsPlugin", "expert_parallel.ExpertParallelPlugin", "swanlab.SwanLabPlugin",
        "lm_eval.LMEvalPlugin",
    )
)  # fmt: skip
"""Axolotl plugins that do not change the result: other implementations, trackers, evaluations."""


def refuse_plugins(ledger: Ledger) -> None:
    """Record Axolotl's `plugins`, refusing those that may change the training."""
    if ledger.find("plugins") is None:
        return
    others = [name for name in ledger.words("plugins") if name not in PLUGINS]
    if others:
        ledger.refuse("plugins", f"{', '.join(others)} may change the training, and echelon does not support it.")
    else:
        ledger.need_not(
            "plugins", "these plugins do not change the training: other implementations, trackers or evaluations."
        )
