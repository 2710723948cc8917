"""Model families, one data file each; `ckpttools.model_families.registry` finds them."""
