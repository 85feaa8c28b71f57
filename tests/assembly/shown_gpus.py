"""Prints the GPUs that this process is given, and MORE. ``python -m tests.assembly.shown_gpus``"""

import os

if __name__ == "__main__":
    print(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), os.environ.get("MORE", ""))
