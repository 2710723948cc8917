"""One file of data for each model family; `ckpttools.families.registry` finds them."""
