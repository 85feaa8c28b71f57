HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 uv run examples/run_vlm_grpo.py \
  --config examples/configs/intent_grpo_3B_megatron.yaml \
  policy.tokenizer.video.num_frames=4 \
  policy.max_total_sequence_length=4096 \
  policy.megatron_cfg.activation_checkpointing=true \
  policy.generation.vllm_cfg.gpu_memory_utilization=0.5 \
  policy.logprob_batch_size=1 \
  policy.train_global_batch_size=4 \
  cluster.gpus_per_node=4
