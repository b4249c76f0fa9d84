"""Names and values that people bring along from other trainers, and what to write here instead.

None of them is ever accepted: a familiar name with a slightly different meaning would be the quietest error of all.
The room holds only these tables; `read.py` looks names up in them.  Trade-off: they are long and need care when
other trainers add names, but a name that is missing from it still is an unknown key, never an ignored one.
"""

_BATCH = (
    "write train.batch_size (rows per optimizer step over all ranks) and train.micro_batch_size (rows at a time; "
    "0: the plan decides); accumulation follows from the two"
)
_DTYPE = 'write model.dtype = "bfloat16" or "float32"'
_FLOAT16 = 'float16 is refused (no loss scaler); write model.dtype = "bfloat16" or "float32"'
_PLACE = 'write offload.parameters, offload.gradients, offload.optimizer = "auto", "host" or "disk"'
_LORA = "offloadz trains the weights themselves and has no adapters; to train a part, name the rest in model.freeze"
_QUANT = 'weights are not quantised here; memory is saved by placement: offload.parameters = "host" or "disk"'
_SHARD = "there is no back end to choose; placement is in [offload], and offload.zero_stage is for several ranks"
_CUT = (
    "layers are not cut over ranks (no tensor or pipeline parallelism); several ranks share a model by its rows: start "
    "them with torchrun, and leave offload.zero_stage to the plan"
)
_RECOMPUTE = (
    'write offload.recompute = "all" (blocks run again in the backward; auto: where their graphs have no room), and '
    "offload.activations for where the inputs of blocks live"
)
_DECIDED = "nothing to set: the plan decides it and `offloadz plan` prints it; leave the key out"
_SAVE = 'write train.save_every = 100 (steps) or "30min"'
_MODEL = "write model.path"
_DATA = "write data.train (a list of files)"
_LENGTH = "write data.max_length, and data.on_long for what happens to longer samples"
_LOG = "metrics.jsonl and TensorBoard are always written, into train.output; leave the key out"
_BETAS = "write optimizer.betas = [0.9, 0.95]"

FOREIGN: dict[str, str] = {
    "gradient_accumulation_steps": _BATCH,
    "grad_accum_steps": _BATCH,
    "accumulate_grad_batches": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "per_device_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "train_batch_size": _BATCH,
    "auto_find_batch_size": _DECIDED,
    "per_device_eval_batch_size": _DECIDED,
    "fp16": _FLOAT16,
    "float16": _FLOAT16,
    "half": _FLOAT16,
    "loss_scale": _FLOAT16,
    "initial_scale_power": _FLOAT16,
    "bf16": _DTYPE,
    "fp32": _DTYPE,
    "tf32": _DTYPE,
    "amp": _DTYPE,
    "mixed_precision": _DTYPE,
    "precision": _DTYPE,
    "torch_dtype": _DTYPE,
    "pure_bf16": _DTYPE,
    "deepspeed": _SHARD,
    "fsdp": _SHARD,
    "fsdp_config": _SHARD,
    "strategy": _SHARD,
    **dict.fromkeys(("tp_plan", "tp_size", "tensor_parallel", "tensor_parallel_size", "device_mesh"), _CUT),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_config"), _CUT),
    "zero_optimization": 'write [offload] with zero_stage = "auto"',
    "stage": 'write offload.zero_stage = "auto"',
    "offload_optimizer": 'write offload.optimizer = "host" or "disk"',
    "offload_param": 'write offload.parameters = "host" or "disk"',
    "offload_params": 'write offload.parameters = "host" or "disk"',
    "cpu_offload": _PLACE,
    "cpu_checkpointing": 'write offload.activations = "host" or "disk"',
    "device_map": _PLACE,
    "max_memory": 'write offload.device_memory and offload.host_memory, such as "22GiB"',
    "offload_folder": 'write offload.swap = ["/a/directory"]',
    "nvme_path": 'write offload.swap = ["/a/directory"]',
    "pin_memory": _DECIDED,
    "buffer_count": "write offload.slots (0: the plan decides)",
    "buffer_size": _DECIDED,
    "stage3_prefetch_bucket_size": "write offload.slots (0: the plan decides)",
    "reduce_bucket_size": _DECIDED,
    "allgather_bucket_size": _DECIDED,
    "overlap_comm": _DECIDED,
    "contiguous_gradients": _DECIDED,
    "stage3_gather_16bit_weights_on_model_save": "final/ always holds the whole model; leave the key out",
    "aio": 'write offload.io = "auto"',
    "learning_rate": "write optimizer.lr",
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "adam_epsilon": "write optimizer.eps",
    "epsilon": "write optimizer.eps",
    "optim": 'write optimizer.name = "adamw"',
    "optimizer_type": 'write optimizer.name = "adamw"',
    "gradient_clipping": "write optimizer.max_grad_norm (0: off)",
    "max_norm": "write optimizer.max_grad_norm (0: off)",
    "gradient_clip_val": "write optimizer.max_grad_norm (0: off)",
    "lr_scheduler": 'write optimizer.schedule = "cosine", "linear" or "constant"',
    "lr_scheduler_type": 'write optimizer.schedule = "cosine", "linear" or "constant"',
    "scheduler": 'write optimizer.schedule = "cosine", "linear" or "constant"',
    "warmup_ratio": "write optimizer.warmup, below 1 for a share of all steps",
    "warmup_steps": "write optimizer.warmup, 1 or above for a number of steps",
    "num_warmup_steps": "write optimizer.warmup, 1 or above for a number of steps",
    "min_lr_ratio": "write optimizer.min_lr, a share of optimizer.lr",
    "num_train_epochs": "write train.epochs",
    "num_epochs": "write train.epochs",
    "max_epochs": "write train.epochs",
    "max_steps": "write train.steps (0: use train.epochs)",
    "num_train_steps": "write train.steps (0: use train.epochs)",
    "output_dir": "write train.output",
    "overwrite_output_dir": 'write train.resume = "never", or another train.output',
    "resume_from_checkpoint": 'write train.resume = "auto" or a checkpoint directory',
    "logging_steps": "write train.log_every",
    "logging_dir": _LOG,
    "report_to": _LOG,
    "eval_steps": "write train.eval_every",
    "eval_strategy": "write train.eval_every (0: never in between)",
    "evaluation_strategy": "write train.eval_every (0: never in between)",
    "save_steps": _SAVE,
    "save_strategy": _SAVE,
    "save_interval": _SAVE,
    "save_total_limit": "write train.keep",
    "load_best_model_at_end": "final/ holds the last weights; write train.keep for how many checkpoints stay",
    "data_seed": "write train.seed",
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "use_reentrant": _RECOMPUTE,
    "dataloader_num_workers": "samples are read and tokenised once at the start; leave the key out",
    "group_by_length": "rows are shuffled by train.seed only; leave the key out",
    "label_smoothing_factor": "the loss is the plain mean over target tokens; from Python, run.step takes a loss_fn",
    "neftune_noise_alpha": "the loss is the plain mean over target tokens; from Python, run.step takes a loss_fn",
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_len": _LENGTH,
    "block_size": _LENGTH,
    "cutoff_len": _LENGTH,
    "sequence_len": _LENGTH,
    "sequence_length": _LENGTH,
    "seq_length": _LENGTH,
    "sample_packing": "write data.packing",
    "template": "write data.chat_template",
    "train_on_inputs": 'write data.train_on = "assistant", "last" or "all"',
    "train_on_prompt": 'write data.train_on = "assistant", "last" or "all"',
    "assistant_only_loss": 'write data.train_on = "assistant"',
    "completion_only_loss": 'write data.train_on = "assistant"',
    "val_size": "write data.eval_share (a share of data.train), or data.eval (a list of files)",
    "val_set_size": "write data.eval_share (a share of data.train), or data.eval (a list of files)",
    "dataset": _DATA,
    "datasets": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "train_file": _DATA,
    "validation_file": "write data.eval (a list of files)",
    "model_name_or_path": _MODEL,
    "model_name": _MODEL,
    "base_model": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
    "tokenizer_name": "the tokenizer is the one in model.path; leave the key out",
    "attn_implementation": 'write model.attention = "auto", "eager" or "sdpa"',
    "flash_attention": 'write model.attention = "auto", "eager" or "sdpa"',
    "use_flash_attention_2": 'write model.attention = "auto", "eager" or "sdpa"',
    "torch_compile": 'write model.kernels = "compile"',
    "use_liger_kernel": 'write model.kernels = "liger"',
    "freeze_layers": "write model.freeze (a list of name patterns)",
    "use_cache": "training never uses a key-value cache; leave the key out",
    "load_in_8bit": _QUANT,
    "load_in_4bit": _QUANT,
    "quantization": _QUANT,
    "quantization_bit": _QUANT,
    "use_lora": _LORA,
    "lora": _LORA,
    "lora_r": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "lora_target": _LORA,
    "lora_target_modules": _LORA,
    "target_modules": _LORA,
    "peft": _LORA,
    "adapter": _LORA,
    "finetuning_type": _LORA,
    "world_size": "the number of ranks comes from the launcher; leave the key out",
}

_ADAMW = 'which is "adamw" here'
_ADAMW_8BIT = 'which is "adamw" with optimizer.state = "int8" here (or "int8-sr", which keeps no fp32 master)'
_LION_8BIT = 'which is "lion" with optimizer.state = "int8" here'
_NO_RULE = 'which is not built; least memory takes "lion", or "adamw" with optimizer.state = "int8-sr"'
_NO_LOSS_SCALER = 'which is refused: its range needs a loss scaler; write "bfloat16" or "float32"'

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "optimizer.name": {
        **dict.fromkeys(
            (
                "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision", "fusedadam",
                "deepspeedcpuadam", "cpuadam", "cpu_adam", "paged_adamw", "paged_adamw_32bit",
            ),
            _ADAMW,
        ),
        **dict.fromkeys(
            (
                "adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw8bit", "pagedadamw8bit",
                "adamw_torch_8bit", "adam8bit", "adam_8bit",
            ),
            _ADAMW_8BIT,
        ),
        **dict.fromkeys(("lion_32bit", "paged_lion", "paged_lion_32bit"), 'which is "lion" here'),
        **dict.fromkeys(("lion8bit", "lion_8bit", "paged_lion_8bit"), _LION_8BIT),
        **dict.fromkeys(
            (
                "adafactor", "adagrad", "rmsprop", "adamax", "lamb", "came", "muon", "sophia", "shampoo", "prodigy",
                "ademamix", "adalomo", "lomo", "badam", "apollo", "galore_adamw", "galore_adamw_8bit",
            ),
            _NO_RULE,
        ),
    },
    "optimizer.schedule": {
        "constant_with_warmup": 'which is "constant" with optimizer.warmup here',
        "cosine_with_min_lr": 'which is "cosine" with optimizer.min_lr here',
        "linear_with_warmup": 'which is "linear" with optimizer.warmup here',
        "cosine_with_warmup": 'which is "cosine" with optimizer.warmup here',
        "warmupdecaylr": 'which is "linear" with optimizer.warmup here',
        "warmuplr": 'which is "constant" with optimizer.warmup here',
    },
    "optimizer.state": {
        **dict.fromkeys(("float32", "32bit"), 'write "fp32"'),
        "bfloat16": 'write "bf16"',
        **dict.fromkeys(("8bit", "fp8"), 'write "int8" (or "int8-sr", which keeps no fp32 master)'),
    },
    "model.dtype": {
        **dict.fromkeys(("bf16", "torch.bfloat16"), 'write "bfloat16"'),
        **dict.fromkeys(("fp32", "float", "torch.float32"), 'write "float32"'),
        **dict.fromkeys(("fp16", "half", "torch.float16"), _NO_LOSS_SCALER),
    },
}  # fmt: skip
