"""Kvarn: an LLM inference engine and planner whose KV cache is the programmable part."""

__version__ = "0.1.0"
