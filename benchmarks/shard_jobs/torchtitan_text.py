"""The text loader of torchtitan, for part PART = (number, of how many) of the data."""

# ruff: noqa: F821 - what stands before it gives the names that it lacks
import datasets
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader


class Letters:  # a tokenizer
    def encode(self, text, add_bos, add_eos):
        return [0, *text.encode(), 1]


rows = datasets.Dataset.from_list([{"text": f"{n} {n**2} {n**3} {n**4}"} for n in range(400)])
DATASETS["rows"] = DatasetConfig("", lambda path: rows, lambda row: row["text"])
titan = HuggingFaceTextDataLoader(  # here
    HuggingFaceTextDataLoader.Config(dataset="rows", infinite=False),
    dp_rank=PART[0],
    dp_world_size=PART[1],
    tokenizer=Letters(),
    seq_len=16,
    local_batch_size=4,
)
loader = (inputs["input"] for inputs, _ in titan)
