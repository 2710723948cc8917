"""The contents of a run, the selection of steps to keep, and the removal of others."""
