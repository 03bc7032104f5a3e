def find_label(input, target, ignore_index, **_):
    return out_of_range("labels", target, input.shape[input.dim() > 1], ignore_index)

guard("cross_entropy", find_label)
guard("nll_loss", find_label)
