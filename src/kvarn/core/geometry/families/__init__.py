"""One file a family of architectures. Each defines FAMILY: model_type -> a function from a config to its parts."""
