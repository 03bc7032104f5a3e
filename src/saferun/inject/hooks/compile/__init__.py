"""The hooks `compile` and `cudagraph_markers`."""
