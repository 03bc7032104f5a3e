"""The hooks `order` and `shards`."""
