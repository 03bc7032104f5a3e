def find_index(input, weight, **_):
    return out_of_range("indices", input, weight.shape[0])

guard("embedding", find_index)
guard("embedding_bag", find_index)
