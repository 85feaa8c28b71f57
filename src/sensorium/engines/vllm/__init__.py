"""The engine ``vllm``: real vLLM in processes of its own. Tokens in, tokens out; weights pushed after each update."""
