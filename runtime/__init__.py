"""Requests to tokens: scheduler, KV cache, runner, engine and the public LLM classes."""
