pip install nvidia-cudnn-cu12==9.16.0.29
# 1) Set environment variable
export WANDB_API_KEY=...
export SLIME_SCRIPT_MODEL_NAME=Qwen3-VL-2B-Instruct
export SLIME_SCRIPT_NUM_GPUS=4

# 2) Download the dataset
hf download --repo-type dataset VeraIsHere/geo3k_imgurl_processed --local-dir $HOME/datasets/geo3k_imgurl_processed

# 3) Run the script:
cd $HOME/slime
python examples/geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.py
