"""Diagnosis of checkpoints: findings and fixes. Changes files only on request."""
