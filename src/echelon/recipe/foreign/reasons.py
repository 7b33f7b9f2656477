"""Why a key that nothing else of the import takes is not missed in a recipe; and values that ask for nothing."""

from collections.abc import Mapping

_NEEDLESS: Mapping[str, str] = {
    "training resumes the newest good checkpoint by itself; --fresh starts over.":
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir "
        "restore_callback_states_from_checkpoint ignore_data_skip",
    "a run is trained, evaluated and exported by commands, not by keys.":
        "do_train do_eval do_predict predict_with_generate task_type lora_task_type inference_mode sample_backend "
        "max_new_tokens export_dir export_size export_device export_legacy_format export_hf_on_finish infer_backend",
    "tokenized text is kept beside the runs, and made anew when something changed.":
        "dataset_prepared_path overwrite_cache tokenized_path cache_dir dataset_keep_in_memory "
        "preprocessing_batch_size skip_prepare_dataset data_shared_file_system preprocess_shards",
    "special tokens are those of the template, and, behind a plain text, data.document_separator.":
        "add_special_tokens append_concat_token",
    "padding and the filling of sequences do not change what is learned.":
        "pad_to_sequence_len pad_to_multiple_of padding_free length_column_name eval_sample_packing eval_packing "
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_eff_est "
        "sample_packing_seq_len_multiplier multipack_real_batches ignore_pad_token_for_loss "
        "streaming_multipack_buffer_size batch_flattening dpo_padding_free pretrain_multipack_buffer_size",
    "each rank reads its own samples, by their number, in an order drawn from run.seed.":
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_multiprocessing_context dataloader_drop_last shuffle_merged_datasets "
        "shuffle_before_merging_datasets shuffle_dataset data_seed dispatch_batches dataloader_in_order "
        "streaming dataset_streaming buffer_size remove_unused_columns label_names batching_workers even_batches "
        "use_seedable_sampler non_blocking use_configured_state gradient_accumulation_kwargs",
    "evaluation takes the training's batch, and measures the loss.":
        "per_device_eval_batch_size eval_batch_size eval_accumulation_steps prediction_loss_only eval_delay "
        "eval_on_start batch_eval_metrics include_for_metrics eval_do_concat_batches eval_table_size "
        "eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset compute_accuracy "
        "eval_on_each_dataset eval_num_beams generate_samples",
    "how the work is spread over processes is a plan made anew; what is computed is the same.":
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "local_rank ddp deepspeed_stage fsdp_final_state_dict_type fsdp_version fsdp_transformer_layer_cls_to_wrap "
        "parallelism_config use_cpu no_cuda ray_scope ray_init_kwargs use_ray ray_num_workers dist_config dist_timeout "
        "init_config expert_parallel_num_nvl_bytes expert_parallel_token_capacity sequence_parallel "
        "use_distributed_optimizer overlap_param_gather overlap_grad_reduce moe_token_dispatcher_type dp_size cp_mode "
        "use_mca use_megatron_bridge use_hyper_parallel mp_replicate_size mp_shard_size heads_k_stride ring_attn_func "
        "experimental_skip_move_to_device "
        "enable_cpu_affinity",
    "losses are summed over tokens and divided once by their number, over all ranks.":
        "average_tokens_across_devices include_num_input_tokens_seen",
    "checkpoints are safetensors, and always hold what resuming needs.":
        "save_safetensors save_on_each_node save_only_model load_from_cache_file save_first_step save_ckpt_as_hf "
        "enable_jit_checkpoint",
    "the console and metrics.jsonl show every step's figures.":
        "logging_first_step logging_strategy logging_dir logging_nan_inf_filter disable_tqdm log_level "
        "log_level_replica log_on_each_node include_tokens_per_second include_tkps plot_loss "
        "include_effective_tokens_per_second skip_memory_metrics eval_use_gather_object debug",
    "where activations and weights are kept while they wait does not change what is computed.":
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading layer_offloading "
        "lora_on_cpu "
        "recompute_granularity use_reentrant_gc tiled_mlp tiled_mlp_num_shards use_cache upcast_layernorm "
        "relora_cpu_offload",
    "other code for the same sums; layers are compiled here, and the loss is chunked.":
        "use_liger_kernel liger_kernel_config enable_liger_kernel liger_rope liger_rms_norm liger_rms_norm_gated "
        "liger_glu_activation liger_swiglu liger_fused_linear_cross_entropy liger_cross_entropy liger_layer_norm "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_unsloth unsloth_cross_entropy_loss "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv flash_optimum "
        "cut_cross_entropy chunked_cross_entropy torch_compile_backend torch_compile_mode torch_compile_options "
        "flex_attn_compile_kwargs use_kernels use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel "
        "gemma4_hybrid_attn_impl use_glm_dsa_kernels use_dsv4_kernels kernel_config use_v1_kernels use_unsloth_gc "
        "apply_rope_fusion bias_activation_fusion moe_grouped_gemm xformers_attention dpo_use_liger_kernel "
        "use_liger_loss use_logits_to_keep",
    "rows of the vocabulary that no text has are not added.": "resize_token_embeddings_to_32x resize_vocab",
    "an adapter is exported as it was trained.": "pissa_convert",
    "the class is found from the checkpoint's config, and its weights are read and placed without being told how.":
        "model_type cls_model_config tokenizer_type is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model is_falcon_derived_model tokenizer_use_fast use_fast_tokenizer "
        "low_cpu_mem_usage device_map infer_dtype model_class "
        "base_model_ignore_patterns",
    "on NVIDIA's GPUs tf32 is used where fp32 products are.": "tf32",
    "quantisation is bitsandbytes' own.": "quant_method bnb_4bit_quant_storage fp8_backend",
    "only weights' own shape is told, whatever the layer's layout.": "lora_fan_in_fan_out fan_in_fan_out",
    "checkpoints are not sent anywhere unless checkpoint.remote says so.":
        "push_to_hub hub_strategy hub_private_repo hub_always_push hub_token hub_revision push_to_hub_token "
        "hub_model_revision push_dataset_to_hub",
    "which precision is fast is known from the device.":
        "fp16_opt_level fp16_backend half_precision_backend bf16_full_eval fp16_full_eval",
    "frozen parameters are not stored twice: the reference is the model without its adapter.":
        "precompute_ref_log_probs precompute_ref_batch_size force_use_ref_model",
    "it is a setting of a method that the file does not ask for.":
        "lisa_n_layers lisa_layers_attribute jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "relora_prune_ratio relora_prune_method relora_warmup_steps eaft_alpha eaft_k asft_alpha "
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules pissa_iter ref_model_mixup_alpha "
        "ref_model_sync_steps kto_desirable_weight kto_undesirable_weight kto_chosen_weight kto_rejected_weight "
        "gptq_groupsize gptq_model_v1 gptq_disable_exllama neat_packing_size loraplus_lr_embedding",
    "in a text model nothing is left to freeze by it.": "freeze_vision_tower freeze_multi_modal_projector",
}  # fmt: skip
NEEDLESS: Mapping[str, str] = {name: reason for reason, names in _NEEDLESS.items() for name in names.split()}

SETTINGS = (
    "galore_", "apollo_", "badam_", "oft_", "ppo_", "swanlab_", "qgalore_", "dion_", "trackio_", "comet_", "otel_",
    "hub_", "bench_", "kt_",
)  # fmt: skip
"""How the settings begin of what is switched on, or refused, by a key of another name."""

_LOST: Mapping[str, str] = {
    "publishing is not part of a run: export it, and upload the folder.": "hub_model_id",
    "the best checkpoint is the one with the least evaluation loss.":
        "metric_for_best_model greater_is_better load_best_model_at_end",
    "metrics go to tensorboard, mlflow and wandb.":
        "use_swanlab use_comet use_trackio use_otel_metrics project dvclive",
    "wandb and mlflow have fewer settings here: project, entity and mode; tracking_uri and experiment.":
        "wandb_watch wandb_log_model wandb_run_id hf_mlflow_log_artifacts wandb_mode",
    "memory is freed by the allocator alone.": "torch_empty_cache_steps gc_steps gc_collect_steps",
    "the batch is the recipe's in every step; train.micro_batch_size: auto finds what fits.": "auto_find_batch_size",
    "batches are drawn without regard to length; which samples meet in a step is another draw.": "group_by_length",
    "padding is never learned, whichever token it is.": "pad_token",
    "a run is stopped by a loss that is not finite (fault.on_bad_step), or by a spike (fault.spike_factor).":
        "loss_watchdog_threshold loss_watchdog_patience",
    "evaluation takes all of the held-out text, up to evaluate.batches.": "eval_num_examples max_eval_samples",
    "experts that are no linear layers keep 16 bits: closer to the model, and more memory.": "quantize_moe_experts",
    "a checkpoint's own quantised weights are read as transformers reads them, or refused when the model is loaded.":
        "model_quantization_config model_quantization_config_kwargs",
    "the tool itself does not read it.": "eta_min adam_eps full_finetune context_parapllel_size strict "
        "test_value total_num_tokens torchdistx_path hf_use_auth_token use_auth_token env",
}  # fmt: skip
LOST: Mapping[str, str] = {name: reason for reason, names in _LOST.items() for name in names.split()}

# Values with which these keys ask for nothing; what TrainingArguments writes out in full is made of them.
DEFAULTS: Mapping[str, object] = {
    "label_smoothing_factor": 0.0, "optim_args": None, "hub_strategy": "every_save", "bias": "none",
    "lora_bias": "none", "fp16_opt_level": "O1", "half_precision_backend": "auto", "ray_scope": "last",
    "accelerator_config": None, "neftune_noise_alpha": None, "fsdp_min_num_params": 0, "fsdp": [],
    "project": "huggingface", "trackio_space_id": "trackio", "liger_kernel_config": None, "eval_delay": 0,
    "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
    "torch_empty_cache_steps": None, "warmup_ratio": 0.0, "past_index": -1, "local_rank": -1, "mp_parameters": "",
    "tp_size": 0, "train_sampling_strategy": "random", "truncation_mode": "keep_start", "router_aux_loss_coef": 0.001,
    "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "discopop_tau": 0.05, "min_sample_len": 2,
    "simpo_gamma": 0.5, "pref_ftx": 0.0, "enable_thinking": True, "temperature": None,
    "nesterov": True, "ns_steps": 5,
}  # fmt: skip
