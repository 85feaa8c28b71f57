bash run.sh trainer.logger=["console","wandb"] trainer.project_name=m3_qwen3_vl algorithm.mode=optimize_threshold
