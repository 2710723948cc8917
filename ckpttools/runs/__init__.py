"""The contents of a run, the steps to keep, and the removal of others."""
