"""The implementation of the public functions, which users import from `ckpttools`."""
