"""How weights are held and multiplied: one file a kind, named as `--weights` names it."""
