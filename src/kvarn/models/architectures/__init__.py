"""One file an architecture, named as the config's model_type; each defines `ARCHITECTURE`, a subclass of `CausalLM`."""
