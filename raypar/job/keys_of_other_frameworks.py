"""What people look for under the names that other frameworks use, for errors about unknown keys and arguments."""

from __future__ import annotations

import re

_ACCUMULATION = "a batch is cut into `microbatches`, whose gradients are added up; batch_size counts the samples of one step"
_CLUSTER = "the Ray cluster to join is `address`; raypar connects the workers itself, without ranks or a rendezvous"
_DATA = "the training data is `data`, and what a run validates on is `validation`; raypar makes the batches"
_DEVICE = "the kind of device is `device`: cpu or gpu"
_EVALUATION = (
    "what validations compute beside the loss is `metrics`: a function of (output, target) that returns (sum, count), or an "
    "object such as those of torchmetrics, for each name"
)
_INITIAL_WEIGHTS = "weights to begin with are init_from: a file, or a folder of Hugging Face"
_KEEPING = "the newest checkpoint.keep checkpoints are kept"
_LIMITS = "the fewest and the most workers of an elastic run are elastic.min_workers and elastic.max_workers"
_LOADING = "CPU processes that read samples ahead are data.processes"
_LOOP = "raypar runs the loop: give `model`, `loss`, `data` and `optimizer`"
_OPTIMIZER = "it is an argument of the optimizer: a key of optimizer.args, such as optimizer.args.lr"
_ORDER = (
    "the order of an epoch's samples is data.shuffle (shuffled anew in every epoch, by `seed` alone, or as they are), or a "
    "sampler of your own: data.sampler, data.weights, data.group_by"
)
_PLAN = "the parallel plan is `plan`: plan.stages (pipeline), plan.replicas (data) and plan.shards (tensor parallel)"
_PRECISION = "parameters are float32 or float64 (`dtype`); mixed precision is precision.compute, or precision.parameters"
_RECOMPUTE = "which layers are computed again (activation checkpointing) is plan.recompute: none, full, or patterns of layers"
_REPLICAS = "data parallelism is plan.replicas"
_RESOURCES = "a worker takes `threads` processors, or one GPU with `device`; which nodes it may be on is `placement`"
_SHARDED_STATE = (
    "state that replicas divide (ZeRO, FSDP) is plan.zero: 0, 1 for the optimizer's state, 2 for gradients too, or 3 for "
    "parameters, which are whole as long as plan.gather says; plan.stages and plan.shards divide the model"
)
_RESHARDING = (
    "how long parameters that replicas divide (plan.zero: 3) are whole is plan.gather: step (from their first use in a step to "
    "the last, as FSDP without resharding), microbatch, or layer (two layers at a time, as FSDP that reshards after forward)"
)
_STEPS = "the length of a run is `steps`, or `epochs`: passes over `data`"
_STOPPING = "a run whose validation loss, or another metric, is no longer better is ended by early_stopping, with its patience"
_TRACKING = "experiment trackers are `trackers`: tensorboard, wandb or mlflow"
_WEIGHT_AVERAGE = (
    "a moving average of the weights (EMA) is `average`, with average.decay, average.every and average.from_step; one of equal "
    "weights (SWA) is not supported yet"
)
_WORKERS = "the plan says how many workers there are: plan.stages x plan.replicas x plan.shards"

_NAMES_BY_ADVICE: dict[str, str] = {
    # how many workers, which part of the model each has
    _WORKERS: "world_size nproc_per_node nprocs nnodes num_nodes devices num_processes num_gpus num_machines",
    f"{_WORKERS}; a DataLoader's num_workers is data.processes": "num_workers",
    _LIMITS: "min_nodes max_nodes min_replicas max_replicas min_world_size max_world_size",
    _PLAN: "parallelism parallel parallelism_config parallel_config distributed strategy distributed_strategy "
    "distributed_type device_mesh mesh ddp",
    "data parallelism is plan.replicas, and there is no wrapper to set up: every plan has the results of one process": (
        "ddp_find_unused_parameters find_unused_parameters static_graph bucket_cap_mb ddp_bucket_cap_mb ddp_backend "
        "gradient_as_bucket_view broadcast_buffers"
    ),
    _REPLICAS: "dp dp_size data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree",
    "pipeline parallelism is plan.stages": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size num_stages pipeline "
    "pipeline_parallel pipeline_parallel_degree pipeline_stages",
    "tensor parallelism is plan.shards": "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size "
    "tensor_parallel_degree",
    "stages of one worker (virtual pipeline stages) are plan.chunks": "virtual_pipeline_model_parallel_size num_virtual_stages "
    "interleave",
    "the first layer of stages 1, 2, ... is plan.cuts; without it layers are divided by measured times": "split_points "
    "split_spec pipeline_split_points partition_method",
    "expert parallelism is not supported yet; experts are divided like other layers, by plan.stages and plan.shards": (
        "ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size moe"
    ),
    "context parallelism is not supported yet; plan.sequence_parallel divides what lies between the layers of plan.shards": (
        "cp cp_size context_parallel context_parallel_size sequence_parallel_size ulysses"
    ),
    _SHARDED_STATE: "zero zero_stage zero_optimization fsdp fsdp_config fsdp_plugin sharding_strategy deepspeed "
    "deepspeed_config deepspeed_plugin zero_redundancy_optimizer",
    _RESHARDING: "reshard_after_forward fsdp_reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers "
    "stage3_max_live_parameters stage3_prefetch_bucket_size stage3_max_reuse_distance",
    "offloading to files of a local disk is plan.optimizer_in: FOLDER for the optimizer's state, and plan.activations_in for "
    "activations; parameters stay in memory, where plan.stages and plan.shards leave less of them": (
        "offload cpu_offload offload_optimizer offload_param offload_optimizer_device offload_optimizer_nvme_path nvme_path "
        "offload_folder offload_params optimizer_cpu_offload optimizer_offload_fraction"
    ),
    _RECOMPUTE: "gradient_checkpointing activation_checkpointing activation_checkpoint checkpoint_activations "
    "recompute_granularity recompute_activations recomputation checkpointing",
    _DEVICE: "use_gpu use_cpu no_cuda accelerator gpus cuda",
    _RESOURCES: "num_cpus cpus cpus_per_worker resources_per_worker num_threads omp_num_threads placement_strategy "
    "trainer_resources",
    _CLUSTER: "master_addr master_port master rdzv_endpoint rdzv_backend rdzv_id rank local_rank node_rank init_method backend "
    "process_group torch_config ray_address cluster head",
    "lost workers are replaced if `elastic` is set": "failure_config fault_tolerance max_restarts",
    "elastic training replaces lost workers; its limits are keys of `elastic`": "max_failures",
    # data
    _DATA: "datasets dataset train_dataset train_dataloader train_dataloaders dataloader dataloaders train_data training_data "
    "eval_dataset val_dataloader val_dataloaders valid_dataset val_dataset val_data validation_data eval_data test_dataset "
    "datamodule data_module",
    "the function or class that makes a batch of samples is data.collate": "data_collator collate_fn collator collation",
    _ORDER: "batch_sampler train_sampler shuffled group_by_length use_distributed_sampler replace_sampler_ddp "
    "use_seedable_sampler split_batches even_batches dispatch_batches",
    "each step reads batch_size samples, the last of an epoch and the first of the next one; data.drop_last ends an epoch with "
    "its last whole batch": "dataloader_drop_last",
    _LOADING: "dataloader_num_workers prefetch_factor pin_memory dataloader_pin_memory persistent_workers",
    "samples are drawn with seeds of their own, made from `seed`: nothing in a data set need be seeded": "worker_init_fn "
    "generator seed_everything set_seed",
    "samples are tensors, or dicts of them: the data set that `data` gives tokenizes": "tokenizer processing_class "
    "image_processor feature_extractor",
    "the fields that the first layer and the loss read are data.input and data.target; fields of other names are arguments of "
    "the model's forward": "label_names remove_unused_columns columns features",
    "how many samples a validation reads is validation.samples, and how many go through the model at once "
    "validation.batch_size": "limit_val_batches eval_iters max_eval_samples per_device_eval_batch_size eval_batch_size "
    "val_batch_size validation_steps eval_accumulation_steps",
    "for a trial give few `steps`, and as `data` a part of the data set (torch.utils.data.Subset)": "fast_dev_run "
    "limit_train_batches overfit_batches max_train_samples num_sanity_val_steps",
    # the loop
    _LOOP: "train_loop_per_worker train_loop_config training_step train_step validation_step do_train do_eval",
    "the model is `model`, a function or class that gives a module": "model_init net network module lightning_module",
    _ACCUMULATION: "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum num_microbatches "
    "micro_batches per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu global_batch_size "
    "train_batch_size batch bs gradient_accumulation_plugin auto_find_batch_size",
    _STEPS: "epoch num_epochs n_epochs max_epochs num_train_epochs max_steps num_steps train_iters iterations min_steps",
    "the longest time that a run may take is max_time_s": "max_time time_limit max_train_time",
    "the model's own loss is the mean over all labels of a step with loss.count": "average_tokens_across_devices "
    "num_items_in_batch",
    "the loss function is `loss`": "loss_fn criterion loss_function compute_loss compute_loss_func",
    "it is an argument of the loss function: a key of loss.args": "label_smoothing label_smoothing_factor ignore_index "
    "class_weights",
    "weights of samples, or of tokens, in the loss are loss.sample_weight, the name of a field": "sample_weights",
    "the optimizer is `optimizer`: a class of PyTorch's or your own, with its arguments, such as optimizer.args.lr": (
        "optim optim_args opt optimizers optimizer_class optimizer_cls optimizer_name configure_optimizers"
    ),
    _OPTIMIZER: "lr learning_rate weight_decay betas adam_beta1 adam_beta2 adam_epsilon eps momentum nesterov",
    "groups of parameters with arguments of their own are optimizer.groups": "param_groups parameter_groups",
    "a scheduler, or a function of the step that returns the factor on the learning rates, is lr_schedule": "lr_scheduler "
    "scheduler lr_scheduler_type lr_scheduler_kwargs schedulers warmup_steps warmup_ratio lr_decay",
    "the largest norm of the whole gradient is clip_norm": "max_grad_norm gradient_clip_val gradient_clipping clip_grad "
    "grad_clip clip_grad_norm",
    "gradients are clipped by their norm (clip_norm); by value is not supported yet": "gradient_clip_algorithm clip_value "
    "clip_grad_value",
    _PRECISION: "bf16 fp32 amp autocast mixed_precision torch_dtype param_dtype compute_dtype use_amp",
    "the dtype in which gradients of bfloat16 parameters are added and sent is precision.gradients": "reduce_dtype "
    "communication_data_type grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 grad_accum_dtype",
    "float16 is precision.compute: fp16, with a loss that is scaled as precision.loss_scale says": "fp16 half float16 "
    "grad_scaler scaler initial_scale_power loss_scale_window hysteresis min_loss_scale loss_scaler",
    "quantized training is not supported yet; bfloat16 is precision.compute": "quantization load_in_8bit load_in_4bit fp8",
    "compiled models (torch.compile) are not supported yet; `model` is computed as it is written": "torch_compile compile "
    "dynamo_backend torch_compile_backend",
    "LoRA adapters of a folder of transformers are model.adapter; else make the module in the function `model` "
    "(get_peft_model)": "peft_config lora lora_config adapters",
    "what requires no gradient is not trained: call requires_grad_(False) in the function `model`": "freeze frozen "
    "trainable_parameters",
    "norms over the samples of all workers are not supported yet: statistics are those of one microbatch, so give larger ones "
    "(batch_size, `microbatches`)": "sync_batchnorm sync_bn",
    _WEIGHT_AVERAGE: "ema ema_decay use_ema swa weight_averaging",
    "the seed of all random numbers is `seed`": "random_seed data_seed",
    "a run has the same results each time; they depend on `seed`, and not on the plan": "deterministic "
    "use_deterministic_algorithms full_determinism",
    # evaluation, checkpoints, what is printed
    _EVALUATION: "compute_metrics eval_metrics preprocess_logits_for_metrics evaluator evaluation",
    "validation takes place every validation.every steps": "eval_steps eval_interval val_check_interval evaluation_strategy "
    "eval_strategy check_val_every_n_epoch eval_every validate_every_n_steps",
    "the best checkpoints by a metric are kept by checkpoint.best, a list of {metric: ..., mode: min or max, keep: ...}": (
        "load_best_model_at_end metric_for_best_model greater_is_better monitor checkpoint_score_attribute "
        "checkpoint_score_order"
    ),
    _STOPPING: "early_stop early_stopping_patience earlystopping",
    "checkpoints are saved every checkpoint.every steps": "save_steps save_interval save_every save_strategy save_freq "
    "checkpoint_frequency checkpoint_interval enable_checkpointing",
    _KEEPING: "save_total_limit num_to_keep save_top_k max_to_keep",
    "runs are stored under run_dir": "output_dir storage_path log_dir logging_dir save_dir default_root_dir checkpoint_dir "
    "project_dir overwrite_output_dir",
    "the run's name is `name`": "run_name experiment_name job_name exp_name",
    "a run is resumed by `raypar resume RUN`, or from Python by resume_from_checkpoint": "resume resume_from ckpt_path "
    "load_checkpoint auto_resume",
    _INITIAL_WEIGHTS: "pretrained_model_name_or_path weights load_from load_weights state_dict finetune_from",
    "nothing is uploaded; `raypar export RUN` writes the weights of a run under run_dir as one file": "push_to_hub "
    "hub_model_id hub_token",
    _TRACKING: "logger loggers report_to log_with wandb wandb_project tensorboard mlflow",
    "the metrics of every step are in metrics.jsonl, in the run's folder under run_dir; `trackers` get them too": (
        "logging_steps log_every_n_steps log_every log_interval steps_per_print print_every logging_strategy"
    ),
    "what a run prints is said by fit(verbose=...); its metrics are in its folder under run_dir": "verbose "
    "enable_progress_bar disable_tqdm progress_bar enable_model_summary",
    "steps are measured every trace_every steps": "profiler profile flops_profiler wall_clock_breakdown",
    "hooks are `callbacks`": "hooks plugins",
    "the fields of TrainingArguments are arguments of their own here, under raypar's names: `steps`, batch_size, `optimizer`, "
    "`checkpoint`, ...": "args training_args training_arguments config",
}

ADVICE: dict[str, str] = {name: advice for advice, names in _NAMES_BY_ADVICE.items() for name in names.split()}
"""A name of another framework -> the sentence that names raypar's own key, or says that there is none yet.

They are from torchrun, DDP, Lightning, Transformers, Accelerate, DeepSpeed, Megatron, torchtitan and Ray Train.
"""

_CALLBACKS: dict[str, str] = {
    "early_?stopping": _STOPPING,
    "(model)?_?checkpoint": f"checkpoints are saved every checkpoint.every steps, and {_KEEPING}",
    "learning_?rate_?monitor|lr_?monitor": "the learning rate is a metric of every step, lr",
    "learning_?rate_?scheduler|lr_?scheduler": ADVICE["lr_scheduler"],
    "tensor_?board|wandb|m_?l_?flow|comet|neptune|clear_?ml": _TRACKING,
    "progress|tqdm|printer|model_?summary": ADVICE["verbose"],
    "weight_?averaging|ema|swa": _WEIGHT_AVERAGE,
    "gradient_?accumulation": _ACCUMULATION,
    "timer": ADVICE["max_time"],
    "device_?stats|throughput": ADVICE["log_interval"],
}
"""What a callback of another framework has in the name of its class -> the sentence that says who does that here."""


def advice_for(key: str) -> str | None:
    """The sentence for a key or argument of another framework; None for names that are not known from one."""
    return ADVICE.get(key.lower().replace("-", "_"))


def advice_for_callback(class_name: str) -> str | None:
    """The sentence for a class of callbacks of another framework, such as `EarlyStoppingCallback`; None for other names."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
    return next((advice for pattern, advice in _CALLBACKS.items() if re.search(rf"(^|_)({pattern})(_|$)", words)), None)
