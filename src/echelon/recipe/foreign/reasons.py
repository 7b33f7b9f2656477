"""Why a key that nothing else of the import takes has no place in a recipe, in plain words; and the tools' defaults."""

from collections.abc import Mapping

_NEEDLESS: Mapping[str, str] = {
    "training resumes the newest good checkpoint by itself; --fresh starts over.":
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir "
        "restore_callback_states_from_checkpoint",
    "a run is trained, evaluated and exported by commands, not by keys.":
        "do_train do_eval do_predict predict_with_generate task_type inference_mode",
    "tokenized text is kept beside the runs, and made anew when something changed.":
        "dataset_prepared_path overwrite_cache tokenized_path cache_dir dataset_keep_in_memory "
        "preprocessing_batch_size skip_prepare_dataset dataset_kwargs",
    "every batch holds whole sequences of data.sequence_len.":
        "pad_to_sequence_len pad_to_multiple_of padding_free group_by_length length_column_name eval_sample_packing "
        "train_sampling_strategy eval_packing packing_strategy sample_packing_group_size sample_packing_bin_size "
        "multipack_real_batches max_packed_sequence_len ignore_pad_token_for_loss eval_causal_lm_metrics",
    "each rank reads its own samples, by their number.":
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_drop_last accelerator_config shuffle_merged_datasets shuffle_before_merging_datasets data_seed "
        "dispatch_batches split_batches dataloader_in_order streaming buffer_size remove_unused_columns label_names",
    "evaluation takes the training's batch.":
        "per_device_eval_batch_size eval_batch_size eval_accumulation_steps prediction_loss_only eval_delay "
        "eval_on_start batch_eval_metrics include_for_metrics eval_do_concat_batches",
    "the process group is set up from the plan.":
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend local_rank ddp "
        "deepspeed_stage fsdp_final_state_dict_type parallelism_config use_cpu no_cuda ray_scope ray_init_kwargs",
    "losses are summed over tokens and divided once by their number, over all ranks.":
        "average_tokens_across_devices include_num_input_tokens_seen",
    "checkpoints are safetensors, and always hold what resuming needs.":
        "save_safetensors save_on_each_node save_only_model load_from_cache_file",
    "the console and metrics.jsonl show every step's figures.":
        "logging_first_step logging_strategy logging_dir logging_nan_inf_filter disable_tqdm log_level "
        "log_level_replica log_on_each_node include_tokens_per_second plot_loss "
        "skip_memory_metrics eval_use_gather_object",
    "recomputation needs no settings here.": "gradient_checkpointing_kwargs",
    "the loss is chunked and layers are compiled here; no kernels are patched in.":
        "use_liger_kernel liger_kernel_config enable_liger_kernel liger_rope liger_rms_norm liger_glu_activation "
        "liger_swiglu liger_fused_linear_cross_entropy liger_layer_norm lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "use_unsloth unsloth_cross_entropy_loss flash_attn_cross_entropy flash_attn_rms_norm plugins cut_cross_entropy "
        "torch_compile_backend torch_compile_mode chunked_cross_entropy",
    "the class is found from the checkpoint's config.":
        "model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
        "is_falcon_derived_model tokenizer_use_fast use_fast_tokenizer resize_vocab resize_token_embeddings_to_32x "
        "low_cpu_mem_usage device_map dtype torch_dtype infer_dtype",
    "on NVIDIA's GPUs tf32 is used where fp32 products are.": "tf32",
    "roles and turns are told from the records; data.train_on says what is learned.": "roles roles_to_train",
    "quantisation is bitsandbytes' own.": "quantization_method quant_method bnb_4bit_quant_storage",
    "only weights' own shape is told, whatever the layer's layout.": "lora_fan_in_fan_out fan_in_fan_out",
    "checkpoints are not sent anywhere unless checkpoint.remote says so.":
        "push_to_hub hub_strategy hub_private_repo hub_always_push hub_token hub_revision push_to_hub_token",
    "which precision is fast is known from the device.":
        "fp16_opt_level fp16_backend half_precision_backend bf16_full_eval fp16_full_eval",
    "frozen parameters are not stored twice: the reference is the model without its adapter.":
        "precompute_ref_log_probs ref_model_mixup force_use_ref_model",
}  # fmt: skip
NEEDLESS: Mapping[str, str] = {name: reason for reason, names in _NEEDLESS.items() for name in names.split()}

_LOST: Mapping[str, str] = {
    "noise on embeddings is not built.": "neftune_noise_alpha noisy_embedding_alpha",
    "smoothing of labels is for preferences alone.": "label_smoothing_factor",
    "parts of the model cannot be trained whole beside an adapter; new tokens can: model.new_tokens.":
        "lora_modules_to_save modules_to_save additional_target trainable_token_indices",
    "an adapter has the same rank and scale at all of its modules.":
        "rank_pattern alpha_pattern lora_layers_to_transform layers_to_transform layers_pattern target_parameters "
        "lora_target_parameters exclude_modules",
    "training starts from model.checkpoint with a new adapter; a run of echelon's own resumes.":
        "lora_model_dir adapter_name_or_path peft_model_id create_new_adapter",
    "biases stay frozen beside an adapter.": "bias lora_bias",
    "which parameters are frozen is decided by the adapter.":
        "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules freeze_extra_modules freeze_vision_tower",
    "the position embedding's scaling is part of the checkpoint's config.": "rope_scaling rope_theta",
    "a checkpoint's config is taken as it is.": "model_config_overrides model_kwargs model_init_kwargs",
    "publishing is not part of a run: export it, and upload the folder.": "hub_model_id",
    "the sum of two losses is not built.": "pref_ftx rpo_alpha dpo_norm_loss",
    "all samples are used; name a file with fewer.": "max_samples eval_num_examples max_train_samples max_eval_samples",
    "the best checkpoint is the one with the least evaluation loss.":
        "metric_for_best_model greater_is_better load_best_model_at_end",
    "metrics go to tensorboard, mlflow and wandb.":
        "comet_project_name swanlab_project use_swanlab use_comet trackio_space_id project dvclive",
    "wandb and mlflow have fewer settings here: project, entity and mode; tracking_uri and experiment.":
        "wandb_watch wandb_log_model wandb_run_id hf_mlflow_log_artifacts",
    "one learning rate, with factors by name: optim.learning_rate_multipliers.":
        "embedding_lr embedding_lr_scale lr_groups loraplus_lr_embedding lr_quadratic_warmup cosine_constant_lr_ratio",
    "the optimizer's other settings are its defaults.": "optim_args optim_target_modules",
    "memory is freed by the allocator alone.": "torch_empty_cache_steps gc_steps auto_find_batch_size",
    "training on images and sound is not built.": "processor_type image_size image_max_pixels video_max_pixels",
    "the template's own end of a turn is learned.": "eos_token efficient_eos train_on_eos eot_tokens train_on_eot",
    "the wording of a prompt is the chat template's.":
        "format no_input_format system_format prompt_style conversation",
    "a hub id is read at its newest revision; download the one you mean, and give its folder.":
        "model_revision revision_of_model",
    "padding is never learned, whichever token it is.": "pad_token",
    "records are read as they are; change them beforehand.": "shards preprocess_shards name",
    "only the loss on completions or conversations' turns is chosen, by data.train_on.": "completion_only_loss",
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
    "tp_size": 0,
}  # fmt: skip
