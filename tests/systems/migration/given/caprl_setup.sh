cd CapRL++/train

conda create -n caprl python=3.10 -y
conda activate caprl

pip install -r scripts/requirements.txt
pip install -e ./verl
REWARD_MODEL=/path/to/Qwen3-4B-Instruct bash scripts/start_reward_serve_rm.sh
