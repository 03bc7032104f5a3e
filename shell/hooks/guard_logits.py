def find_shape(input, target, **_):
    expected = input.shape[:1] + input.shape[2:] if input.dim() > 1 else input.shape[1:]
    if target.shape not in (expected, input.shape):
        text = f"logits of shape {tuple(input.shape)} go with labels of shape {tuple(expected)}"
        return ValueError(f"{text}, not {tuple(target.shape)}")

guard("cross_entropy", find_shape)
