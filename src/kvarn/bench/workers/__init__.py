"""One engine a file, run as a program of its own by the Python that has the engine: `python FILE MODEL THREADS`.

It says {"ready": true} once the model is loaded, then answers each line {"case": ..., "prompts": [[ids]]} on its input
with {"prefill_s": ..., "decode_s": ...}, or {"error": text}. All but run_kvarn.py import nothing of Kvarn.
"""
