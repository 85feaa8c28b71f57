"""The engine ``vllm``: real vLLM in other processes. Tokens in, tokens out; weights pushed after each update."""
