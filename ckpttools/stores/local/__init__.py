"""Local files: reading by position, durable writes, links, and staging of checkpoints."""
