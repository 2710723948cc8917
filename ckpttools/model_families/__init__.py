"""One file of data for each model family; `ckpttools.model_families.registry` finds them."""
