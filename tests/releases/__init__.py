"""What of an earlier commit's `ckpt` is different now: see compare.py."""
