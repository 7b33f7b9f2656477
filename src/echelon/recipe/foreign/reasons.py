"""Reasons why keys that are not imported are not needed in a recipe, and values that have no effect."""

from collections.abc import Mapping

_NEEDLESS: Mapping[str, str] = {
    "training resumes the newest good checkpoint by itself; --fresh starts over.":
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir "
        "restore_callback_states_from_checkpoint ignore_data_skip",
    "a run is trained, evaluated and exported by commands, not by keys.":
        "do_train do_eval do_predict predict_with_generate task_type lora_task_type inference_mode sample_backend "
        "max_new_tokens export_dir export_size export_device export_legacy_format export_hf_on_finish infer_backend",
    "tokenized text is stored next to the runs and rebuilt when something changes.":
        "dataset_prepared_path overwrite_cache tokenized_path cache_dir dataset_keep_in_memory "
        "preprocessing_batch_size skip_prepare_dataset data_shared_file_system preprocess_shards",
    "special tokens come from the chat template; data.document_separator follows each plain text.":
        "add_special_tokens append_concat_token",
    "padding and the method of packing do not change what is trained.":
        "pad_to_sequence_len pad_to_multiple_of padding_free length_column_name eval_sample_packing eval_packing "
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_eff_est "
        "sample_packing_seq_len_multiplier multipack_real_batches ignore_pad_token_for_loss "
        "streaming_multipack_buffer_size batch_flattening dpo_padding_free pretrain_multipack_buffer_size",
    "each rank reads its own samples by index, in an order derived from run.seed.":
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_multiprocessing_context dataloader_drop_last shuffle_merged_datasets "
        "shuffle_before_merging_datasets shuffle_dataset data_seed dispatch_batches dataloader_in_order "
        "streaming dataset_streaming buffer_size remove_unused_columns label_names batching_workers even_batches "
        "use_seedable_sampler non_blocking use_configured_state gradient_accumulation_kwargs",
    "evaluation uses the micro-batch size of training and measures the loss.":
        "per_device_eval_batch_size eval_batch_size eval_accumulation_steps prediction_loss_only eval_delay "
        "eval_on_start batch_eval_metrics include_for_metrics eval_do_concat_batches eval_table_size "
        "eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset compute_accuracy "
        "eval_on_each_dataset eval_num_beams generate_samples",
    "echelon plans how the work is distributed over processes; the result is the same.":
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "local_rank ddp deepspeed_stage fsdp_final_state_dict_type fsdp_version fsdp_transformer_layer_cls_to_wrap "
        "parallelism_config use_cpu no_cuda ray_scope ray_init_kwargs use_ray ray_num_workers dist_config dist_timeout "
        "init_config expert_parallel_num_nvl_bytes expert_parallel_token_capacity sequence_parallel "
        "use_distributed_optimizer overlap_param_gather overlap_grad_reduce moe_token_dispatcher_type dp_size cp_mode "
        "use_mca use_megatron_bridge use_hyper_parallel mp_replicate_size mp_shard_size heads_k_stride ring_attn_func "
        "experimental_skip_move_to_device "
        "enable_cpu_affinity",
    "the loss is summed over the tokens of all ranks and divided once by their number.":
        "average_tokens_across_devices include_num_input_tokens_seen",
    "checkpoints are safetensors and always contain the state needed to resume.":
        "save_safetensors save_on_each_node save_only_model load_from_cache_file save_first_step save_ckpt_as_hf "
        "enable_jit_checkpoint",
    "the console and metrics.jsonl show the metrics of every step.":
        "logging_first_step logging_strategy logging_dir logging_nan_inf_filter disable_tqdm log_level "
        "log_level_replica log_on_each_node include_tokens_per_second include_tkps plot_loss "
        "include_effective_tokens_per_second skip_memory_metrics eval_use_gather_object debug",
    "where activations and weights are stored does not change the result.":
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading layer_offloading "
        "lora_on_cpu "
        "recompute_granularity use_reentrant_gc tiled_mlp tiled_mlp_num_shards use_cache upcast_layernorm "
        "relora_cpu_offload",
    "it is another implementation of the same computation; echelon compiles layers and chunks the loss.":
        "use_liger_kernel liger_kernel_config enable_liger_kernel liger_rope liger_rms_norm liger_rms_norm_gated "
        "liger_glu_activation liger_swiglu liger_fused_linear_cross_entropy liger_cross_entropy liger_layer_norm "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_unsloth unsloth_cross_entropy_loss "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv flash_optimum "
        "cut_cross_entropy chunked_cross_entropy torch_compile_backend torch_compile_mode torch_compile_options "
        "flex_attn_compile_kwargs use_kernels use_scattermoe use_sonicmoe experts_implementation fused_attn_kernel "
        "gemma4_hybrid_attn_impl use_glm_dsa_kernels use_dsv4_kernels kernel_config use_v1_kernels use_unsloth_gc "
        "apply_rope_fusion bias_activation_fusion moe_grouped_gemm xformers_attention dpo_use_liger_kernel "
        "use_liger_loss use_logits_to_keep",
    "unused rows of the vocabulary are not added.": "resize_token_embeddings_to_32x resize_vocab",
    "an adapter is exported in the form in which it was trained.": "pissa_convert",
    "the checkpoint's config determines the class; loading and placing the weights needs no setting.":
        "model_type cls_model_config tokenizer_type is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model is_falcon_derived_model tokenizer_use_fast use_fast_tokenizer "
        "low_cpu_mem_usage device_map infer_dtype model_class "
        "base_model_ignore_patterns",
    "on NVIDIA GPUs, fp32 matrix products use tf32.": "tf32",
    "quantization uses the defaults of bitsandbytes.": "quant_method bnb_4bit_quant_storage fp8_backend",
    "the layout of a layer's weight is detected.": "lora_fan_in_fan_out fan_in_fan_out",
    "checkpoints are not uploaded unless checkpoint.remote is set.":
        "push_to_hub hub_strategy hub_private_repo hub_always_push hub_token hub_revision push_to_hub_token "
        "hub_model_revision push_dataset_to_hub",
    "the device determines which precision is fast.":
        "fp16_opt_level fp16_backend half_precision_backend bf16_full_eval fp16_full_eval",
    "with an adapter, the reference is the model without it; no copy is stored.":
        "precompute_ref_log_probs precompute_ref_batch_size force_use_ref_model",
    "it is a setting of a method that the file does not enable.":
        "lisa_n_layers lisa_layers_attribute jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "relora_prune_ratio relora_prune_method relora_warmup_steps eaft_alpha eaft_k asft_alpha "
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules pissa_iter ref_model_mixup_alpha "
        "ref_model_sync_steps kto_desirable_weight kto_undesirable_weight kto_chosen_weight kto_rejected_weight "
        "gptq_groupsize gptq_model_v1 gptq_disable_exllama neat_packing_size loraplus_lr_embedding",
    "a text model does not have these modules.": "freeze_vision_tower freeze_multi_modal_projector",
}  # fmt: skip
NEEDLESS: Mapping[str, str] = {name: reason for reason, names in _NEEDLESS.items() for name in names.split()}

SETTINGS = (
    "galore_", "apollo_", "badam_", "oft_", "ppo_", "swanlab_", "qgalore_", "dion_", "trackio_", "comet_", "otel_",
    "hub_", "bench_", "kt_",
)  # fmt: skip
"""Prefixes of settings of features that another key enables, and that are refused by that key if unsupported."""

_LOST: Mapping[str, str] = {
    "publishing is not part of a run: export the model and upload the folder.": "hub_model_id",
    "the best checkpoint is the one with the lowest evaluation loss.":
        "metric_for_best_model greater_is_better load_best_model_at_end",
    "the supported trackers are tensorboard, mlflow and wandb.":
        "use_swanlab use_comet use_trackio use_otel_metrics project dvclive",
    "the supported settings are project, entity and mode for wandb, tracking_uri and experiment for mlflow.":
        "wandb_watch wandb_log_model wandb_run_id hf_mlflow_log_artifacts wandb_mode",
    "only the allocator frees memory.": "torch_empty_cache_steps gc_steps gc_collect_steps",
    "the batch size is fixed by the recipe; train.micro_batch_size: auto finds what fits.": "auto_find_batch_size",
    "batches are sampled independently of length, so the samples of a step differ.": "group_by_length",
    "padding is never a target, whichever token it is.": "pad_token",
    "echelon handles a loss that is not finite (fault.on_bad_step) and loss spikes (fault.spike_factor).":
        "loss_watchdog_threshold loss_watchdog_patience",
    "evaluation uses all held-out text, up to evaluate.batches.": "eval_num_examples max_eval_samples",
    "the quantized weights of a checkpoint are loaded by transformers, or refused when the model is loaded.":
        "model_quantization_config model_quantization_config_kwargs",
    "the tool itself ignores it.": "eta_min adam_eps full_finetune context_parapllel_size strict "
        "test_value total_num_tokens torchdistx_path hf_use_auth_token use_auth_token env",
}  # fmt: skip
LOST: Mapping[str, str] = {name: reason for reason, names in _LOST.items() for name in names.split()}

# Values of these keys that have no effect; a full dump of TrainingArguments contains many of them.
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
