"""Local files: reads by position, durable writes, links, and staging of checkpoints."""
