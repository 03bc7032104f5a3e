"""Writes nanochat's tokenizer and shards below NANOCHAT_BASE_DIR: every batch is the same.

PYTHONPATH names nanochat's own folder. Each document is longer than a row, and all are equal.
"""

import logging
import os

import pyarrow
import pyarrow.parquet
import torch
from nanochat.tokenizer import RustBPETokenizer

logging.disable(logging.INFO)  # rustbpe's
base = os.environ["NANOCHAT_BASE_DIR"]
text = " ".join(str(n * n) for n in range(99))
tokenizer = RustBPETokenizer.train_from_iterator(iter([text]), 300)
tokenizer.save(f"{base}/tokenizer")
of_bytes = torch.ones(tokenizer.get_vocab_size(), dtype=torch.int32)
torch.save(of_bytes, f"{base}/tokenizer/token_bytes.pt")
os.makedirs(f"{base}/base_data", exist_ok=True)
for name in ("train", "validation"):  # the last one is not trained on
    table = pyarrow.table({"text": [text] * 1000})
    pyarrow.parquet.write_table(table, f"{base}/base_data/{name}.parquet", row_group_size=200)
