"""Diagnosis of checkpoints: defects and fixes. Changes something only when asked to."""
