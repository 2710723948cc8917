"""Local files: reading by position, durable writes, links, and where a checkpoint grows."""
