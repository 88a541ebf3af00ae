"""A small LLM server: continuous batching over a paged KV cache, attention by cupyflash."""
