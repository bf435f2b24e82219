"""Measuring a model in this process (latency, throughput) or behind any OpenAI-compatible server (serve)."""
