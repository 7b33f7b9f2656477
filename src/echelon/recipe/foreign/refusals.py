"""Keys without which the training would be another: what echelon does not have, in plain words.

A file that gives one of them, other than as null, false or the tool's default, is refused.
"""

from collections.abc import Mapping

from echelon.recipe.foreign.ledger import Ledger

_REFUSED: Mapping[str, str] = {
    "reward models and classifiers are not trained here.":
        "reward_model process_reward_model center_rewards_coefficient num_labels step_separator max_completion_length "
        "train_on_last_step_only reward_model_path reward_adapter reward_funcs reward_weights",
    "a policy is not trained on its own answers here.":
        "trl vllm ebft grpo num_generations num_iterations epsilon epsilon_high kl_coef cliprange gamma lam "
        "temperature "
        "generation_kwargs use_vllm num_ppo_epochs",
    "of preferences echelon has DPO alone.":
        "orpo_alpha cpo_alpha simpo_gamma desirable_weight undesirable_weight rl_adapter_ref_model lmbda seq_kd "
        "kto_tag",
    "DPO has one loss, with a reference that stays as it was.":
        "rpo_alpha pref_ftx pref_bco_weight ld_alpha dpo_norm_loss dpo_use_weighting use_weighting dpo_loss_weights "
        "loss_weights f_divergence_type f_alpha_divergence_coef sync_ref_model reference_free discopop_tau ref_model "
        "ref_model_adapters ref_model_quantization_bit ref_model_init_kwargs precompute_ref_log_probs_from",
    "the loss is the plain one of the next token.":
        "use_dft_loss use_asft_loss use_eaft_loss use_eaft label_smoothing_factor kd_trainer kd_ce_alpha kd_alpha "
        "kd_temperature orthogonal_loss multi_token_prediction mtp router_aux_loss_coef moe_aux_loss_coef "
        "chunked_cross_entropy_num trainer_cls",
    "masked diffusion is not built.": "diffusion",
    "experts computed on the CPU (KTransformers) are not built.": "use_kt",
    "the batch would be divided among the processes, and not be each one's; take it out, and set the batch of one.":
        "split_batches batch_size",
    "the form of Muon's step is fixed here.": "nesterov ns_steps",
    "noise on embeddings is not built.": "neftune_noise_alpha noisy_embedding_alpha",
    "training with numbers of fewer bits in the weights is not built.":
        "qat use_onebitllms nvfp4_merge_aware dsv4_fp4_grouped_mode gptq gptq_bits quantization fp8_config "
        "fp8_enable_fsdp_float8_all_gather llmcompressor load_in_fp8",
    "which parameters are trained is decided by the adapter, or all are.":
        "unfrozen_parameters spectrum_top_fraction spectrum_model_name lisa_step_interval use_llama_pro "
        "freeze_language_model freeze_mm_modules train_mm_modules mixture_of_depths layers_to_freeze",
    "adapters are trained once, not merged and begun again.":
        "relora relora_steps",
    "the learning rate is not restarted.":
        "jagged_restart_steps",
    "of optimizers echelon has adamw, adamw_8bit, lion, muon and sgd.":
        "use_galore use_apollo use_badam use_adam_mini optim_target_modules optim_args came adam_beta3 adam_epsilon2",
    "an adapter has the same rank and scale at all of its modules, which are linear layers.":
        "rank_pattern alpha_pattern lora_rank_pattern lora_alpha_pattern lora_layers_to_transform layers_to_transform "
        "peft_layers_to_transform layers_pattern peft_layers_pattern target_parameters lora_target_parameters "
        "exclude_modules layer_replication peft_layer_replication use_qalora qalora_group_size peft loftq_config "
        "corda_config eva_config megatron_config trainable_token_indices peft_trainable_token_indices arrow_config "
        "use_bdlora lora_ga_config",
    "biases stay frozen beside an adapter.": "bias lora_bias",
    "training starts from model.checkpoint with a new adapter; a run of echelon's own resumes.":
        "lora_model_dir adapter_name_or_path peft_model_id create_new_adapter",
    "a checkpoint's config is taken as it is; write what differs into its config.json.":
        "rope_scaling rope_theta model_config_overrides overrides_of_model_config overrides_of_model_kwargs "
        "model_config model_kwargs model_init_kwargs model_config_type",
    "the model's own code is run as it is.": "s2_attention shift_attn llama4_linearized_experts",
    "weights are those of model.checkpoint; a new model is given as model.config.": "reinit_weights",
    "one learning rate, with factors by name: optim.learning_rate_multipliers.":
        "embedding_lr embedding_lr_scale lr_groups",
    "the warm-up is a straight line, and what follows is one of optim.schedule.":
        "lr_quadratic_warmup cosine_constant_lr_ratio warmup_lr_rate warmup_lr num_stable_steps",
    "echelon trains on text; images, sound and video are not built.":
        "processor_type processor_config image_size image_max_pixels image_min_pixels image_resize_algorithm "
        "image_do_pan_and_scan video_max_pixels video_min_pixels video_fps video_maxlen crop_to_patches "
        "use_audio_in_video audio_sampling_rate media_dir images",
    "the tool itself has sample_packing in its place.": "max_packed_sequence_len",
    "samples are drawn in a shuffled order.": "curriculum_sampling disable_shuffling train_sampling_strategy",
    "what is too short is not left out.": "min_sample_len",
    "of a conversation, the assistant's turns are learned with the token that ends them: data.train_on.":
        "roles_to_train train_on_eos train_on_eot message_field_training_detail drop_system_message split_thinking "
        "field_thinking template_thinking_key train_on_split efficient_eos enable_thinking preserve_thinking",
    "records are read as they are; change them beforehand.":
        "shards shards_idx input_format input_transform skip conversation field_human field_model logprobs_field "
        "tool_format truncation_mode chat_template_kwargs",
    "a hub id is read at its newest revision; fetch the one you mean, and give its folder.":
        "revision dataset_revision",
    "the tokenizer is used as it is.":
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
"""Axolotl's plugins that leave what is computed as it is: other code for it, a tracker, a measurement."""


def refuse_plugins(ledger: Ledger) -> None:
    """Account for Axolotl's `plugins`: refuses those that may change what is trained."""
    if ledger.find("plugins") is None:
        return
    others = [name for name in ledger.words("plugins") if name not in PLUGINS]
    if others:
        ledger.refuse("plugins", f"what {', '.join(others)} changes is not known here.")
    else:
        ledger.need_not("plugins", "other code for the same sums, a tracker, or a measurement.")
