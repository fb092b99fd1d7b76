"""What people look for under the names that other frameworks use, for errors about unknown keys and arguments."""

from __future__ import annotations

_WORKERS = "the plan says how many workers there are: plan.stages x plan.replicas x plan.shards"
_CLIPPING = "the largest norm of the whole gradient is clip_norm"
_ACCUMULATION = "a batch is cut into `microbatches`, whose gradients are added up; batch_size counts the samples of one step"
_OPTIMIZER = "it is an argument of the optimizer: a key of optimizer.args, such as optimizer.args.lr"
_STEPS = "the length of a run is `steps`; one epoch is the number of samples divided by batch_size"
_SHARDS = "tensor parallelism is plan.shards"
_KEEPING = "the newest checkpoint.keep checkpoints are kept"
_DATA = "the training data is `data`, and what a run validates on is `validation`; raypar makes the batches"
_LOADING = "CPU processes that read samples ahead are data.processes"
_SCHEDULER = "a function of the step that returns the factor on the learning rates is lr_schedule"
_STAGES = "pipeline parallelism is plan.stages"
_REPLICAS = "data parallelism is plan.replicas"
_PRECISION = "parameters are float32 or float64 (`dtype`); mixed precision is precision.compute"
_CUTS = "the first layer of stages 1, 2, ... is plan.cuts; without it layers are divided by measured times"
_PLAN = "the parallel plan is `plan`: plan.stages (pipeline), plan.replicas (data) and plan.shards (tensor parallel)"
_FOLDER = "runs are stored under run_dir"
_SAVING = "checkpoints are saved every checkpoint.every steps"
_VALIDATION = "validation takes place every validation.every steps"
_RECOMPUTE = "which layers are computed again (activation checkpointing) is plan.recompute: none, full, or patterns of layers"
_DEVICE = "the kind of device is `device`: cpu or gpu"
_CHUNKS = "stages of one worker (virtual pipeline stages) are plan.chunks"
_TRACKING = "experiment trackers are `trackers`: tensorboard, wandb or mlflow"
_RESUMING = "a run is resumed by `raypar resume RUN`, or from Python by resume_from_checkpoint"
_SHARDED_STATE = "state that replicas share out (ZeRO, FSDP) is not there yet; plan.stages and plan.shards divide a model"

ADVICE: dict[str, str] = {
    **dict.fromkeys(("world_size", "nproc_per_node", "nnodes", "num_nodes", "devices", "num_processes", "num_gpus"), _WORKERS),
    "num_workers": f"{_WORKERS}; a DataLoader's num_workers is data.processes",
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "gradient_clipping", "clip_grad", "grad_clip"), _CLIPPING),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "num_microbatches"), _ACCUMULATION
    ),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"), _ACCUMULATION),
    **dict.fromkeys(("global_batch_size", "train_batch_size"), _ACCUMULATION),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas"), _OPTIMIZER),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_steps", "train_iters"), _STEPS),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"), _SHARDS),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size", "num_stages"), _STAGES),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_parallel_degree", "pipeline_stages"), _STAGES),
    **dict.fromkeys(("dp", "dp_size", "data_parallel", "data_parallel_size", "data_parallel_degree"), _REPLICAS),
    "data_parallel_replicate_degree": _REPLICAS,
    "tensor_parallel_degree": _SHARDS,
    **dict.fromkeys(("bf16", "fp16", "amp", "autocast", "mixed_precision", "torch_dtype"), _PRECISION),
    **dict.fromkeys(("split_points", "split_spec", "pipeline_split_points"), _CUTS),
    **dict.fromkeys(("parallelism", "parallel", "parallelism_config", "parallel_config", "distributed"), _PLAN),
    **dict.fromkeys(("output_dir", "storage_path", "log_dir", "save_dir", "default_root_dir"), _FOLDER),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_frequency", "checkpoint_interval"), _SAVING),
    **dict.fromkeys(("eval_steps", "eval_interval", "val_check_interval", "evaluation_strategy"), _VALIDATION),
    **dict.fromkeys(("zero", "zero_stage", "zero_optimization", "fsdp", "fsdp_config", "sharding_strategy"), _SHARDED_STATE),
    **dict.fromkeys(("save_total_limit", "num_to_keep", "save_top_k", "max_to_keep"), _KEEPING),
    **dict.fromkeys(("datasets", "dataset", "train_dataset", "train_dataloader", "train_dataloaders", "dataloader"), _DATA),
    **dict.fromkeys(("eval_dataset", "val_dataloader", "val_dataloaders", "valid_dataset"), _DATA),
    **dict.fromkeys(("dataloader_num_workers", "prefetch_factor", "pin_memory"), _LOADING),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type", "warmup_steps", "warmup_ratio"), _SCHEDULER),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint"), _RECOMPUTE),
    **dict.fromkeys(("checkpoint_activations", "recompute_granularity", "recompute_activations"), _RECOMPUTE),
    **dict.fromkeys(("use_gpu", "use_cpu", "no_cuda", "accelerator", "gpus"), _DEVICE),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "num_virtual_stages", "interleave"), _CHUNKS),
    **dict.fromkeys(("logger", "loggers", "report_to"), _TRACKING),
    **dict.fromkeys(("resume", "resume_from", "ckpt_path", "load_checkpoint"), _RESUMING),
    **dict.fromkeys(("loss_fn", "criterion", "loss_function"), "the loss function is `loss`"),
    **dict.fromkeys(("failure_config", "fault_tolerance", "max_restarts"), "lost workers are replaced if `elastic` is set"),
    "train_loop_per_worker": "raypar runs the loop: give `model`, `loss`, `data` and `optimizer`",
    "max_failures": "elastic training replaces lost workers; its limits are keys of `elastic`",
    "random_seed": "the seed of all random numbers is `seed`",
}
"""A name of another framework -> the sentence that names raypar's own.

They are from torchrun, Lightning, Transformers, DeepSpeed, Megatron, torchtitan and Ray Train.
"""


def advice_for(key: str) -> str | None:
    """The sentence for a key or argument of another framework; None for names that are not known from one."""
    return ADVICE.get(key.lower().replace("-", "_"))
